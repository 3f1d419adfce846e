// Proves, from the compiled code and without a GPU: the kernels contract what FlashAttention-3's kernels
// contract and nothing else. The machine code of this program (cuobjdump -sass) is read where that tool is
// found: in $BITATTN_CUOBJDUMP, on the PATH or beside nvcc; else the PTX of the same source.
//
// Counts are demanded exactly, so an instruction too many or too few of any kind is seen. Orders of additions
// are not read here: the bits of whole kernels show them (kernels_fa3_test.cpp).

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "gpu/kernels/bitattn_kernels.h"

namespace bitattn {
namespace {

enum class Kind { add, add_keeping, multiply, fused, ex2, lg2, select, negate, move, foreign, other };

struct Operand {
  std::string name;
  bool negative = false;
};

struct Instruction {
  Kind kind = Kind::other;
  std::string text;
  Operand target;
  std::vector<Operand> sources;
};

using Code = std::vector<Instruction>;
using Program = std::map<std::string, Code>;  ///< by mangled kernel name

/// What an opcode is to these tests. `foreign`: fp32 arithmetic that the kernels must not hold.
Kind kind_of(const std::string& opcode) {
  static const std::map<std::string, Kind> known{
      {"FADD.FTZ", Kind::add},
      {"FADD", Kind::add_keeping},
      {"FMUL.FTZ", Kind::multiply},
      {"FFMA.FTZ", Kind::fused},
      {"MUFU.EX2", Kind::ex2},
      {"MUFU.LG2", Kind::lg2},
      {"FSEL", Kind::select},
      {"SEL", Kind::select},
      {"MOV", Kind::move},
      {"add.rn.ftz.f32", Kind::add},
      {"sub.rn.ftz.f32", Kind::add},
      {"add.rn.f32", Kind::add_keeping},
      {"mul.rn.ftz.f32", Kind::multiply},
      {"fma.rn.ftz.f32", Kind::fused},
      {"ex2.approx.ftz.f32", Kind::ex2},
      {"lg2.approx.ftz.f32", Kind::lg2},
      {"selp.f32", Kind::select},
      {"neg.f32", Kind::negate},
      {"mov.f32", Kind::move},
  };
  const auto found = known.find(opcode);
  if (found != known.end()) return found->second;
  for (const char* prefix : {"FADD", "FMUL", "FFMA", "MUFU.EX2", "MUFU.LG2", "DADD", "DMUL", "DFMA"}) {
    if (opcode.starts_with(prefix)) return Kind::foreign;
  }
  if (opcode.ends_with(".f32") || opcode.ends_with(".f64")) {
    for (const char* prefix : {"add.", "sub.", "mul.", "fma.", "mad.", "ex2.", "lg2.", "div."}) {
      if (opcode.starts_with(prefix)) return Kind::foreign;
    }
  }
  return Kind::other;
}

Operand operand(std::string text) {
  const auto trim = [&] {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.erase(0, 1);
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.pop_back();
  };
  trim();
  Operand result;
  if (!text.empty() && text.front() == '-') {
    result.negative = true;
    text.erase(0, 1);
  }
  const std::size_t dot = text.find(".reuse");
  if (dot != std::string::npos) text.erase(dot);
  result.name = text;
  return result;
}

/// One statement "[@predicate] OPCODE target, sources".
Instruction instruction(const std::string& statement) {
  std::istringstream in(statement);
  std::string opcode;
  in >> opcode;
  if (!opcode.empty() && opcode.front() == '@') in >> opcode;
  Instruction result;
  result.text = statement;
  result.kind = kind_of(opcode);
  std::string part;
  bool first = true;
  while (std::getline(in, part, ',')) {
    if (first) {
      result.target = operand(part);
    } else {
      result.sources.push_back(operand(part));
    }
    first = false;
  }
  if (opcode == "sub.rn.ftz.f32" && result.sources.size() == 2) result.sources[1].negative ^= true;
  return result;
}

Program parse_machine_code(std::istream& in) {
  Program program;
  Code* code = nullptr;
  std::string line;
  while (std::getline(in, line)) {
    const std::size_t function = line.find("Function : ");
    if (function != std::string::npos) {
      code = &program[line.substr(function + 11)];
      continue;
    }
    const std::size_t begin = line.find("*/");
    const std::size_t end = line.find(';');
    if (code != nullptr && line.find("/*") < begin && begin < end && end != std::string::npos) {
      code->push_back(instruction(line.substr(begin + 2, end - begin - 2)));
    }
  }
  return program;
}

Program parse_ptx(std::istream& in) {
  Program program;
  Code* code = nullptr;
  std::string line;
  while (std::getline(in, line)) {
    const std::size_t entry = line.find(".entry ");
    if (entry != std::string::npos) {
      code = &program[line.substr(entry + 7, line.find('(') - entry - 7)];
      continue;
    }
    const std::size_t end = line.find(';');
    if (code != nullptr && end != std::string::npos) code->push_back(instruction(line.substr(0, end)));
  }
  return program;
}

std::string machine_code_tool() {
  const char* given = std::getenv("BITATTN_CUOBJDUMP");
  for (const std::string& tool : {std::string(given != nullptr ? given : ""), std::string("cuobjdump"),
                                  std::string(BITATTN_CUDA_BIN) + "/cuobjdump"}) {
    if (!tool.empty() && std::system(("'" + tool + "' --version >/dev/null 2>&1").c_str()) == 0) return tool;
  }
  return "";
}

const Program& program() {
  static const Program code = [] {
    bitattn_kernels_check_device();  // so that the kernels are linked into this program at all
    const std::string tool = machine_code_tool();
    if (tool.empty()) {
      std::printf("no cuobjdump: reading the PTX\n");
      std::ifstream ptx(BITATTN_KERNELS_PTX);
      return parse_ptx(ptx);
    }
    const std::string command = "'" + tool + "' -sass /proc/" + std::to_string(getpid()) + "/exe 2>/dev/null";
    std::printf("reading the machine code with %s\n", tool.c_str());
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
    std::stringstream text;
    std::array<char, 65536> buffer{};
    std::size_t got = 0;
    while (pipe && (got = std::fread(buffer.data(), 1, buffer.size(), pipe.get())) > 0) {
      text.write(buffer.data(), static_cast<std::streamsize>(got));
    }
    return parse_machine_code(text);
  }();
  return code;
}

/// The one kernel whose mangled name holds all of `parts`.
const Code& kernel(const std::vector<std::string>& parts) {
  static const Code none;
  const Code* found = nullptr;
  for (const auto& [name, code] : program()) {
    bool all = true;
    for (const std::string& part : parts) all = all && name.find(part) != std::string::npos;
    if (!all) continue;
    EXPECT_EQ(found, nullptr) << "two kernels are called " << parts.front();
    found = &code;
  }
  EXPECT_NE(found, nullptr) << "no kernel is called " << parts.front();
  return found != nullptr ? *found : none;
}

std::size_t count(const Code& code, Kind kind) {
  std::size_t n = 0;
  for (const Instruction& i : code) n += i.kind == kind ? 1 : 0;
  return n;
}

/// What last wrote `operand` before instruction `before`, seen through copies, selections and turned signs;
/// nullptr: nothing that these tests know. `negative` follows the signs.
const Instruction* source_of(const Code& code, std::size_t before, const Operand& wanted, bool& negative) {
  negative = wanted.negative;
  std::string name = wanted.name;
  for (std::size_t i = before; i-- > 0;) {
    const Instruction& at = code[i];
    if (at.target.name != name) continue;
    if (at.kind == Kind::select || at.kind == Kind::move || at.kind == Kind::negate) {
      // Of a selection, the side that a register holds: the other is a constant.
      const Operand* next = nullptr;
      for (const Operand& s : at.sources) {
        const bool is_register = s.name.starts_with("R") ? s.name != "RZ" : s.name.starts_with("%f");
        if (is_register && next == nullptr) next = &s;
      }
      if (next == nullptr) continue;
      name = next->name;
      negative ^= next->negative != (at.kind == Kind::negate);
      continue;
    }
    return &at;
  }
  return nullptr;
}

struct Exponents {
  std::size_t fused = 0;       ///< ex2 of a fused multiply-add with a subtracted addend
  std::size_t multiplied = 0;  ///< ex2 of a product
  std::size_t unknown = 0;
  std::size_t rounded_references = 0;  ///< fused ones whose addend is a product rounded on its own
  std::size_t differences = 0;         ///< multiplied ones whose factor is a difference
};

Exponents exponents(const Code& code) {
  Exponents found;
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (code[i].kind != Kind::ex2) continue;
    bool negative = false;
    const Instruction* argument = source_of(code, i, code[i].sources.at(0), negative);
    if (argument == nullptr || negative) {
      ++found.unknown;
      continue;
    }
    const auto position = static_cast<std::size_t>(argument - code.data());
    if (argument->kind == Kind::fused && argument->sources.size() == 3) {
      bool addend_negative = false;
      const Instruction* addend = source_of(code, position, argument->sources[2], addend_negative);
      found.fused += addend_negative ? 1 : 0;
      found.unknown += addend_negative ? 0 : 1;
      found.rounded_references += addend != nullptr && addend->kind == Kind::multiply ? 1 : 0;
    } else if (argument->kind == Kind::multiply) {
      ++found.multiplied;
      bool difference = false;
      for (const Operand& s : argument->sources) {
        bool ignored = false;
        const Instruction* factor = source_of(code, position, s, ignored);
        difference = difference || (factor != nullptr && factor->kind == Kind::add);
      }
      found.differences += difference ? 1 : 0;
    } else {
      ++found.unknown;
    }
  }
  return found;
}

struct ForwardKernel {
  const char* name;
  std::size_t head_dim, block_n, steps;  ///< steps: softmax steps in the code (first, masked, unmasked)
};

class CodeOfTheForward : public ::testing::TestWithParam<ForwardKernel> {};

TEST_P(CodeOfTheForward, ContractsWhatTheRealKernelsContract) {
  const ForwardKernel& k = GetParam();
  const Code& code = kernel({"forward_kernel", k.name});
  const std::size_t later = k.steps - 1;
  const Exponents e = exponents(code);
  EXPECT_EQ(e.unknown, 0U);
  // Scores: the product x * c is fused with the rounded m * c; a thread has block_n / 2 scores.
  EXPECT_EQ(e.fused, k.steps * k.block_n / 2);
  EXPECT_EQ(e.rounded_references, e.fused);
  // Rescales: subtract first, then scale; two rows a thread.
  EXPECT_EQ(e.multiplied, 2 * later);
  EXPECT_EQ(e.differences, e.multiplied);
  EXPECT_EQ(count(code, Kind::ex2), e.fused + e.multiplied);
  // Besides the exponents: the row sum's rescale with its first addition, and the max term of the LSE.
  EXPECT_EQ(count(code, Kind::fused), e.fused + 2 * later + 2);
  // Additions: the rest of the row sums, the rescales' differences, and the four partial sums of two rows.
  EXPECT_EQ(count(code, Kind::add), k.steps * 2 * (k.block_n / 4 - 1) + 2 * later + 4);
  // Products: references, rescales, O's rescale and normalisation, and both terms of the LSE (c * ln2 may be
  // shared).
  const std::size_t products = 2 * k.steps + 2 * later + k.steps * k.head_dim / 2 + 2;
  EXPECT_GE(count(code, Kind::multiply), products + 1);
  EXPECT_LE(count(code, Kind::multiply), products + 2);
  EXPECT_EQ(count(code, Kind::lg2), 2U);
  EXPECT_EQ(count(code, Kind::add_keeping), 0U);
  EXPECT_EQ(count(code, Kind::foreign), 0U);
}

INSTANTIATE_TEST_SUITE_P(KernelsCode, CodeOfTheForward,
                         ::testing::Values(ForwardKernel{"ForwardTileILi128ELi176E", 128, 176, 2},
                                           ForwardKernel{"ForwardTileILi128ELi128E", 128, 128, 3},
                                           ForwardKernel{"ForwardTileILi64ELi192E", 64, 192, 2},
                                           ForwardKernel{"ForwardTileILi64ELi128E", 64, 128, 3}));

struct BackwardKernel {
  const char* name;
  std::size_t head_dim, block_m;
};

class CodeOfTheBackward : public ::testing::TestWithParam<BackwardKernel> {};

TEST_P(CodeOfTheBackward, ContractsWhatTheRealKernelsContract) {
  const BackwardKernel& k = GetParam();
  const Code& code = kernel({"backward_kernel", k.name});
  const std::size_t scores = 2 * k.block_m / 2;  // a thread's, in the masked and the unmasked step
  const Exponents e = exponents(code);
  EXPECT_EQ(e.unknown, 0U);
  EXPECT_EQ(e.fused, scores);
  EXPECT_EQ(e.multiplied, 0U);
  EXPECT_EQ(count(code, Kind::fused), scores);  // nothing else is fused
  // dS: every difference is the factor of one product, and the products besides are the scale of dK.
  std::size_t gradients = 0;
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (code[i].kind != Kind::multiply) continue;
    for (const Operand& s : code[i].sources) {
      bool negative = false;
      const Instruction* factor = source_of(code, i, s, negative);
      if (factor != nullptr && factor->kind == Kind::add) {
        ++gradients;
        EXPECT_FALSE(negative);
      }
    }
  }
  EXPECT_EQ(gradients, scores);
  EXPECT_EQ(count(code, Kind::add), scores);
  EXPECT_EQ(count(code, Kind::multiply), scores + k.head_dim / 2);
  EXPECT_EQ(count(code, Kind::lg2), 0U);
  EXPECT_EQ(count(code, Kind::add_keeping), 0U);
  EXPECT_EQ(count(code, Kind::foreign), 0U);
}

INSTANTIATE_TEST_SUITE_P(KernelsCode, CodeOfTheBackward,
                         ::testing::Values(BackwardKernel{"BackwardTileILi128ELi80ELb0E", 128, 80},
                                           BackwardKernel{"BackwardTileILi128ELi64ELb1E", 128, 64},
                                           BackwardKernel{"BackwardTileILi64ELi128ELb0E", 64, 128},
                                           BackwardKernel{"BackwardTileILi64ELi128ELb1E", 64, 128}));

TEST(KernelsCode, TheRowSumsStartWithTheSecondProduct) {
  for (const std::size_t head_dim : {64U, 128U}) {
    const Code& code = kernel({"preprocess_kernel", "ILi" + std::to_string(head_dim) + "E"});
    EXPECT_EQ(count(code, Kind::fused), 7U);
    EXPECT_EQ(count(code, Kind::multiply), 2U);  // the second product, and LSE * log2(e)
    EXPECT_EQ(count(code, Kind::add), head_dim == 64 ? 3U : 4U);
    EXPECT_EQ(count(code, Kind::foreign), 0U);
    // The chain of fused products begins at a product rounded on its own.
    std::size_t chained = 0;
    std::size_t begun = 0;
    for (std::size_t i = 0; i < code.size(); ++i) {
      if (code[i].kind != Kind::fused) continue;
      bool negative = false;
      const Instruction* addend = source_of(code, i, code[i].sources.at(2), negative);
      ASSERT_NE(addend, nullptr);
      begun += addend->kind == Kind::multiply ? 1 : 0;
      chained += addend->kind == Kind::fused ? 1 : 0;
    }
    EXPECT_EQ(begun, 1U);
    EXPECT_EQ(chained, 6U);
  }
}

TEST(KernelsCode, CastsMultiplyOnceAndGroupsKeepSubnormals) {
  for (const auto& [name, head_dim, rows] : {std::tuple{"BackwardTileILi128ELi80ELb0E", 128U, 80U},
                                             std::tuple{"BackwardTileILi128ELi64ELb1E", 128U, 64U},
                                             std::tuple{"BackwardTileILi64ELi128ELb0E", 64U, 128U},
                                             std::tuple{"BackwardTileILi64ELi128ELb1E", 64U, 128U}}) {
    const Code& code = kernel({"dq_postprocess_kernel", name});
    EXPECT_EQ(count(code, Kind::multiply), head_dim * rows / 256);
    EXPECT_EQ(count(code, Kind::fused) + count(code, Kind::add) + count(code, Kind::add_keeping), 0U);
    EXPECT_EQ(count(code, Kind::foreign), 0U);
  }
  for (const char* name : {"group_sum_kernelILi64E", "group_sum_kernelILi128E"}) {
    const Code& code = kernel({name});
    EXPECT_EQ(count(code, Kind::add), 0U);
    EXPECT_GE(count(code, Kind::add_keeping), 4U);
    EXPECT_EQ(count(code, Kind::multiply), 4U);
    EXPECT_EQ(count(code, Kind::fused) + count(code, Kind::foreign), 0U);
  }
}

}  // namespace
}  // namespace bitattn
