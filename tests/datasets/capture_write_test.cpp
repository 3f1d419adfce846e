// Writing: what is read back has the same bits, a file appears whole or not at all, and nothing is left
// behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5_hl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>

#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/output_file.hpp"
#include "datasets/philox.hpp"
#include "datasets/regime.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using hdf5::Handle;
using test::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
Tensor<T> random_bits(const std::vector<std::size_t>& shape, std::uint32_t stream) {
  Tensor<T> tensor(shape);
  for (std::size_t i = 0; i < tensor.data.size(); ++i) {
    const PhiloxCounter words = philox({static_cast<std::uint32_t>(i), stream, 0, 0}, {3, 4});
    std::memcpy(&tensor.data[i], words.data(), sizeof(T));  // NaNs of any payload and all else
  }
  return tensor;
}

template <class T>
bool same_bits(const Tensor<T>& a, const Tensor<T>& b) {
  return a.shape == b.shape && a.data.size() == b.data.size() &&
         (a.data.empty() || std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(T)) == 0);
}

/// A capture with every tensor filled with random bits.
Capture full_capture(Layout layout) {
  Capture c;
  Problem& p = c.problem;
  p.layout = layout;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.head_dim = 40;
  p.head_dim_v = 24;
  p.softmax_scale = 0.1;
  p.causal = true;
  p.window_left = 11;
  p.window_right = 3;
  p.softcap = 15.5;
  p.deterministic = false;
  p.causal_alignment = CausalAlignment::top_left;
  if (layout == Layout::thd) {
    p.cu_seqlens_q = {0, 5, 5, 33};
    p.cu_seqlens_k = {0, 20, 41, 41};
    p.batch = 3;
    p.seqlen_q = 28;
    p.seqlen_k = 21;
    p.q.shape = {33, 4, 40};
    p.k.shape = {41, 2, 40};
  } else {
    p.batch = 2;
    p.seqlen_q = 33;
    p.seqlen_k = 41;
  }
  p.q = random_bits<std::uint16_t>(p.q_shape(), 1);
  p.k = random_bits<std::uint16_t>(p.k_shape(), 2);
  p.v = random_bits<std::uint16_t>(p.v_shape(), 3);
  p.dout = random_bits<std::uint16_t>(p.out_shape(), 4);
  p.attributes = {{"kernel", std::string("flash-attention-3")},
                  {"step", std::int64_t{-3}},
                  {"softmax_scale_f32", static_cast<double>(0.1F)},
                  {"empty", std::string()},
                  {"text", std::string("Grüße, \"quoted\"\nsecond line")}};
  p.array_attributes = {{"heads", {{3}, std::vector<std::int64_t>{1, -2, 3}}},
                        {"names", {{2}, std::vector<std::string>{"a", ""}}},
                        {"losses", {{1, 2}, std::vector<double>{0.1, -0.0}}}};
  Result& r = c.recorded;
  r.backend = "fa3";
  r.out = random_bits<std::uint16_t>(p.out_shape(), 5);
  r.dq = random_bits<std::uint16_t>(p.q_shape(), 6);
  r.dk = random_bits<std::uint16_t>(p.k_shape(), 7);
  r.dv = random_bits<std::uint16_t>(p.v_shape(), 8);
  r.lse = random_bits<float>(p.row_shape(), 9);
  std::vector<std::size_t> rows = p.row_shape();
  rows.back() = 64;
  r.intermediates.dpsum = random_bits<float>(rows, 10);
  r.intermediates.lse_log2 = random_bits<float>(rows, 11);
  rows.push_back(64);
  r.intermediates.dq_accum = random_bits<float>(rows, 12);
  rows[rows.size() - 3] = 2;
  rows[rows.size() - 2] = 128;
  r.intermediates.dk_accum = random_bits<float>(rows, 13);
  r.intermediates.dv_accum = random_bits<float>(rows, 14);
  r.uncast.out = random_bits<double>(p.out_shape(), 15);
  r.uncast.lse = random_bits<double>(p.row_shape(), 16);
  r.uncast.dq = random_bits<double>(p.q_shape(), 17);
  r.uncast.dk = random_bits<double>(p.k_shape(), 18);
  r.uncast.dv = random_bits<double>(p.v_shape(), 19);
  r.dq_order_fixed = false;
  r.dkv_order_fixed = false;
  r.notes = {"first note", "second note"};
  return c;
}

void expect_same(const Capture& a, const Capture& b) {
  const Problem& p = a.problem;
  const Problem& s = b.problem;
  EXPECT_EQ(p.layout, s.layout);
  EXPECT_EQ(p.batch, s.batch);
  EXPECT_EQ(p.seqlen_q, s.seqlen_q);
  EXPECT_EQ(p.seqlen_k, s.seqlen_k);
  EXPECT_EQ(p.heads_q, s.heads_q);
  EXPECT_EQ(p.heads_kv, s.heads_kv);
  EXPECT_EQ(p.head_dim, s.head_dim);
  EXPECT_EQ(p.head_dim_v, s.head_dim_v);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(p.softmax_scale), std::bit_cast<std::uint64_t>(s.softmax_scale));
  EXPECT_EQ(p.causal, s.causal);
  EXPECT_EQ(p.window_left, s.window_left);
  EXPECT_EQ(p.window_right, s.window_right);
  EXPECT_EQ(p.softcap, s.softcap);
  EXPECT_EQ(p.deterministic, s.deterministic);
  EXPECT_EQ(p.causal_alignment, s.causal_alignment);
  EXPECT_EQ(p.cu_seqlens_q, s.cu_seqlens_q);
  EXPECT_EQ(p.cu_seqlens_k, s.cu_seqlens_k);
  EXPECT_TRUE(same_bits(p.q, s.q) && same_bits(p.k, s.k) && same_bits(p.v, s.v) && same_bits(p.dout, s.dout));
  const Result& r = a.recorded;
  const Result& t = b.recorded;
  EXPECT_TRUE(same_bits(r.out, t.out) && same_bits(r.dq, t.dq) && same_bits(r.dk, t.dk) &&
              same_bits(r.dv, t.dv));
  EXPECT_TRUE(same_bits(r.lse, t.lse));
  EXPECT_TRUE(same_bits(r.intermediates.dpsum, t.intermediates.dpsum));
  EXPECT_TRUE(same_bits(r.intermediates.lse_log2, t.intermediates.lse_log2));
  EXPECT_TRUE(same_bits(r.intermediates.dq_accum, t.intermediates.dq_accum));
  EXPECT_TRUE(same_bits(r.intermediates.dk_accum, t.intermediates.dk_accum));
  EXPECT_TRUE(same_bits(r.intermediates.dv_accum, t.intermediates.dv_accum));
  EXPECT_TRUE(same_bits(r.uncast.out, t.uncast.out) && same_bits(r.uncast.lse, t.uncast.lse));
  EXPECT_TRUE(same_bits(r.uncast.dq, t.uncast.dq) && same_bits(r.uncast.dk, t.uncast.dk) &&
              same_bits(r.uncast.dv, t.uncast.dv));
  EXPECT_EQ(r.dq_order_fixed, t.dq_order_fixed);
  EXPECT_EQ(r.dkv_order_fixed, t.dkv_order_fixed);
  EXPECT_EQ(r.notes, t.notes);
}

void write_one(const std::string& path, const Capture& c, const std::string& group = "/") {
  CaptureWriter writer(path);
  writer.write_capture(group, c.problem, c.recorded);
  writer.commit();
}

TEST(WriteCapture, ReadsBackBitByBit) {
  const TemporaryFolder folder;
  for (const Layout layout : {Layout::bshd, Layout::thd}) {
    const Capture c = full_capture(layout);
    const std::string path = folder / "a.h5";
    write_one(path, c, "/step_3/layer_1");
    const Capture back = read_capture(path + ":/step_3/layer_1");
    expect_same(c, back);
    Attributes expected = c.problem.attributes;
    expected["backend"] = std::string("fa3");
    EXPECT_EQ(back.problem.attributes, expected);
    EXPECT_EQ(back.problem.array_attributes.size(), 3U);
    for (const auto& [name, array] : c.problem.array_attributes) {
      EXPECT_EQ(back.problem.array_attributes.at(name).shape, array.shape);
      EXPECT_EQ(back.problem.array_attributes.at(name).values, array.values);
    }
  }
}

TEST(WriteCapture, WrittenAgainItIsTheSameFile) {
  const TemporaryFolder folder;
  const Capture c = full_capture(Layout::bshd);
  write_one(folder / "a.h5", c);
  write_one(folder / "b.h5", c);
  write_one(folder / "c.h5", read_capture(folder / "a.h5"));
  EXPECT_EQ(test::file_bytes(folder / "a.h5"), test::file_bytes(folder / "b.h5"));
  EXPECT_EQ(test::file_bytes(folder / "a.h5"), test::file_bytes(folder / "c.h5"));
}

TEST(WriteCapture, AllGoldensSurviveTheRoundTrip) {
  const char* all = std::getenv("BITATTN_GOLDENS");
  const TemporaryFolder folder;
  std::size_t captures = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(all != nullptr ? all : BITATTN_BUNDLED_GOLDENS)) {
    if (entry.path().extension() != ".h5") continue;
    for (const std::string& name : list_captures(entry.path())) {
      const Capture c = read_capture(name);
      write_one(folder / "a.h5", c);
      const Capture back = read_capture(folder / "a.h5");
      expect_same(c, back);
      EXPECT_EQ(c.problem.attributes, back.problem.attributes) << name;
      EXPECT_EQ(c.problem.array_attributes.size(), back.problem.array_attributes.size()) << name;
      ++captures;
    }
  }
  EXPECT_GT(captures, 10U);
}

TEST(WriteCapture, ProblemOnlyAndEmptySequences) {
  const TemporaryFolder folder;
  GenerateOptions options;
  options.seqlen_k = 0;
  Capture c;
  c.problem = generate(options);
  write_one(folder / "a.h5", c);
  const Capture back = read_capture(folder / "a.h5");
  expect_same(c, back);
  EXPECT_FALSE(back.has_recorded());
  EXPECT_FALSE(back.problem.attributes.contains("backend"));
}

TEST(WriteCapture, IsChunkedShuffledDeflatedAndChecked) {
  const TemporaryFolder folder;
  GenerateOptions options;
  options.heads_q = options.heads_kv = 8;
  options.seqlen_q = options.seqlen_k = 1500;
  Capture c;
  c.problem = generate(options);
  write_one(folder / "a.h5", c);
  const Handle file(H5Fopen((folder / "a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  const Handle q(H5Dopen2(file.get(), "q", H5P_DEFAULT), H5Dclose);
  const Handle create(H5Dget_create_plist(q.get()), H5Pclose);
  ASSERT_EQ(H5Pget_layout(create.get()), H5D_CHUNKED);
  hsize_t chunk[4] = {};
  ASSERT_EQ(H5Pget_chunk(create.get(), 4, chunk), 4);
  EXPECT_LE(chunk[0] * chunk[1] * chunk[2] * chunk[3] * 2, 1U << 20U);
  EXPECT_GE(chunk[0] * chunk[1] * chunk[2] * chunk[3] * 2, 1U << 18U);
  std::vector<H5Z_filter_t> filters;
  for (int i = 0; i < H5Pget_nfilters(create.get()); ++i) {
    std::size_t values = 0;
    unsigned flags = 0;
    unsigned config = 0;
    filters.push_back(H5Pget_filter2(create.get(), static_cast<unsigned>(i), &flags, &values, nullptr, 0,
                                     nullptr, &config));
  }
  EXPECT_THAT(filters, ElementsAre(H5Z_FILTER_SHUFFLE, H5Z_FILTER_DEFLATE, H5Z_FILTER_FLETCHER32));
  const Handle type(H5Dget_type(q.get()), H5Tclose);
  EXPECT_TRUE(hdf5::is_bf16_type(type.get()));
}

TEST(WriteCapture, TensorsOfManyChunks) {
  const TemporaryFolder folder;
  GenerateOptions options;
  options.heads_q = options.heads_kv = 8;
  options.seqlen_q = options.seqlen_k = 1500;
  Capture c;
  c.problem = generate(options);
  write_one(folder / "a.h5", c);
  expect_same(c, read_capture(folder / "a.h5"));
}

TEST(WriteFinding, CarriesUnitsDescriptionAndDimensionScales) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  const auto residue = random_bits<double>({2, 4, 33}, 30);
  const auto leak = random_bits<float>({2, 4, 33}, 31);
  const auto other = random_bits<double>({5}, 32);
  {
    CaptureWriter writer(path);
    const std::vector<std::string> axes{"batch", "head", "query"};
    writer.write_capture("/layer", full_capture(Layout::bshd).problem, {});
    writer.write_finding("/layer", "row_max_residue", residue, "1", "what the largest exponent is", axes);
    writer.write_finding("/layer", "score_gradient_sum/before_cast", leak, "1", "sum", axes);
    writer.write_finding("/layer", "per_head", other, "1", "another length under the same name", {"head"});
    writer.write_finding("/", "summary", other, "s", "", {});
    writer.write_finding("/layer", "scores", random_bits<double>({2, 3}, 33), "1", "axes named as tensors",
                         {"q", "k"});
    writer.write_attributes("/layer/findings", {{"rows", std::int64_t{264}}});
    writer.commit();
  }
  EXPECT_THAT(list_captures(path), ElementsAre(path + ":/layer"));
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  const auto open = [&](const char* name) {
    return Handle(H5Dopen2(file.get(), name, H5P_DEFAULT), H5Dclose);
  };
  const Handle set = open("/layer/findings/row_max_residue");
  Fp64Tensor back({2, 4, 33});
  ASSERT_GE(H5Dread(set.get(), H5T_IEEE_F64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data.data()), 0);
  EXPECT_TRUE(same_bits(residue, back));
  Fp32Tensor back32({2, 4, 33});
  const Handle nested = open("/layer/findings/score_gradient_sum/before_cast");
  ASSERT_GE(H5Dread(nested.get(), H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, back32.data.data()), 0);
  EXPECT_TRUE(same_bits(leak, back32));
  for (const char* scale : {"batch", "head", "query", "head_5"}) {
    EXPECT_GT(H5DSis_scale(open(("/layer/findings/" + std::string(scale)).c_str()).get()), 0) << scale;
  }
  EXPECT_GT(H5DSis_attached(set.get(), open("/layer/findings/query").get(), 2), 0);
  EXPECT_GT(H5DSis_attached(nested.get(), open("/layer/findings/query").get(), 2), 0);
  EXPECT_GT(H5DSis_attached(open("/layer/findings/per_head").get(), open("/layer/findings/head_5").get(), 0),
            0);
  char label[16] = {};
  EXPECT_EQ(H5DSget_label(set.get(), 1, label, sizeof label), 4);
  EXPECT_STREQ(label, "head");
  EXPECT_GT(H5Aexists(set.get(), "units"), 0);
  EXPECT_GT(H5Aexists(set.get(), "description"), 0);
  EXPECT_GT(H5Aexists_by_name(file.get(), "/layer/findings", "rows", H5P_DEFAULT), 0);
}

TEST(WriteStreamed, PiecesInAnyOrderAndNanWhereNothingWasWritten) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  const auto piece = random_bits<float>({1, 2, 100, 700}, 40);
  {
    CaptureWriter writer(path);
    writer.create_streamed_fp32("/g", "trace/scores", {2, 2, 300, 700}, "1", "scores");
    for (const std::size_t first : {200U, 0U}) {
      writer.write_streamed_fp32("/g", "trace/scores", {1, 0, first, 0}, {1, 2, 100, 700}, piece.data.data());
    }
    EXPECT_THROW(
        writer.write_streamed_fp32("/g", "trace/scores", {1, 0, 250, 0}, {1, 2, 100, 700}, piece.data.data()),
        InputError);
    EXPECT_THROW(writer.write_streamed_fp32("/g", "other", {0}, {1}, piece.data.data()), std::logic_error);
    writer.commit();
  }
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  const Handle set(H5Dopen2(file.get(), "/g/trace/scores", H5P_DEFAULT), H5Dclose);
  Fp32Tensor back({2, 2, 300, 700});
  ASSERT_GE(H5Dread(set.get(), H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data.data()), 0);
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t i = 0; i < 300; ++i) {
        for (std::size_t j = 0; j < 700; ++j) {
          const bool written = b == 1 && (i < 100 || i >= 200);
          const float expected =
              written ? piece.data[(h * 100 + i % 100) * 700 + j] : std::bit_cast<float>(0xffffffffU);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(back.data[((b * 2 + h) * 300 + i) * 700 + j]),
                    std::bit_cast<std::uint32_t>(expected));
        }
      }
    }
  }
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return error.what();
  }
  return "accepted";
}

TEST(WriteCapture, RefusesWhatDoesNotFit) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  Capture c = full_capture(Layout::bshd);
  c.recorded.out.shape[1] = 32;
  EXPECT_THAT(refusal([&] { write_one(path, c); }),
              HasSubstr("tensor out has shape [2, 32, 4, 24], expected [2, 33, 4, 24]"));
  c = full_capture(Layout::bshd);
  c.problem.softmax_scale = 0;
  EXPECT_THAT(refusal([&] { write_one(path, c); }), HasSubstr("softmax_scale is 0"));
  c = full_capture(Layout::bshd);
  c.recorded.lse.data.pop_back();
  EXPECT_THAT(refusal([&] { write_one(path, c); }), HasSubstr("holds 263 values"));
  EXPECT_THAT(refusal([&] {
                CaptureWriter writer(path);
                writer.write_capture("/", full_capture(Layout::bshd).problem, {});
                writer.write_capture("/", full_capture(Layout::bshd).problem, {});
              }),
              HasSubstr("cannot be written"));
  EXPECT_TRUE(folder.entries().empty());
}

TEST(WriteCapture, WithoutCommitNothingIsLeft) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  {
    CaptureWriter writer(path);
    writer.write_capture("/", full_capture(Layout::bshd).problem, {});
    EXPECT_THAT(folder.entries(), ::testing::Not(::testing::Contains("a.h5")));
  }
  EXPECT_TRUE(folder.entries().empty());
  test::write_bytes(path, "an older file");
  {
    CaptureWriter writer(path);
    writer.write_capture("/", full_capture(Layout::bshd).problem, {});
  }
  EXPECT_EQ(test::file_bytes(path), "an older file");
  write_one(path, full_capture(Layout::bshd));
  EXPECT_EQ(list_captures(path).size(), 1U);
  EXPECT_THAT(folder.entries(), ElementsAre("a.h5"));
}

TEST(WriteCapture, RefusesPlacesThatCannotBeWritten) {
  const TemporaryFolder folder;
  const auto start = [](const std::string& path) { return refusal([&] { CaptureWriter writer(path); }); };
  EXPECT_THAT(start(folder / "none/a.h5"), HasSubstr("none/a.h5: cannot be written: folder"));
  EXPECT_THAT(start(folder / "none/a.h5"), HasSubstr("No such file or directory"));
  EXPECT_THAT(start(folder.path().string()), HasSubstr("it is a folder"));
  EXPECT_THAT(start(folder.path().string() + "/"), HasSubstr("not the name of a file"));
  EXPECT_THAT(start(""), HasSubstr("not the name of a file"));
  EXPECT_THAT(start("/proc/a.h5"), HasSubstr("cannot be written: folder /proc"));
  EXPECT_THAT(start("/dev/null"), HasSubstr("it exists and is not a regular file"));
  test::write_bytes(folder / "file", "x");
  EXPECT_THAT(start(folder / "file/a.h5"), HasSubstr("cannot be written"));
  if (::geteuid() != 0) {
    std::filesystem::create_directory(folder / "closed");
    std::filesystem::permissions(folder / "closed", std::filesystem::perms::owner_read);
    EXPECT_THAT(start(folder / "closed/a.h5"), HasSubstr("Permission denied"));
  }
}

TEST(WriteCapture, RefusesToReplaceItsOwnInput) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  write_one(path, full_capture(Layout::bshd));
  const std::string bytes = test::file_bytes(path);
  std::filesystem::create_hard_link(path, folder / "hard.h5");
  std::filesystem::create_symlink(path, folder / "soft.h5");
  for (const char* name : {"a.h5", "hard.h5", "soft.h5", "./a.h5"}) {
    EXPECT_THAT(refusal([&] {
                  CaptureWriter writer(folder / name, {"other.h5", path + ":/layer"});
                }),
                HasSubstr("cannot be written: it is the input " + path + ":/layer itself"));
  }
  EXPECT_EQ(test::file_bytes(path), bytes);
  EXPECT_EQ(refusal([&] { CaptureWriter writer(folder / "b.h5", {path}); }), "accepted");
}

TEST(WriteCapture, ALinkKeepsPointingAtTheNewFile) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  test::write_bytes(folder / "real/a.h5", "old");
  std::filesystem::create_symlink(folder / "real/a.h5", folder / "link.h5");
  write_one(folder / "link.h5", full_capture(Layout::bshd));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.h5"));
  EXPECT_EQ(list_captures(folder / "real/a.h5").size(), 1U);
  EXPECT_THAT(folder.entries(), ElementsAre("link.h5", "real"));
}

/// Runs an action in a child process; its exit status, or 1000 + signal.
int in_child(const std::function<int()>& action) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(action());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(WriteCapture, AFullDiskIsOneLineAndLeavesNothing) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  test::write_bytes(path, "an older file");
  const Capture c = full_capture(Layout::bshd);
  write_one(folder / "whole.h5", c);
  const std::size_t whole = std::filesystem::file_size(folder / "whole.h5");
  std::filesystem::remove(folder / "whole.h5");
  // A limit of the file's size stands for the disk: writes beyond it fail, at every stage of the work.
  int refused = 0;
  constexpr std::size_t kScratch = 65536;  // the library writes a little beyond the end and cuts it off
  for (std::size_t limit = 0; limit <= whole + 2 * kScratch; limit += 1 + whole / 37) {
    const int status = in_child([&] {
      ::signal(SIGXFSZ, SIG_IGN);
      struct rlimit size {
        limit, limit
      };
      ::setrlimit(RLIMIT_FSIZE, &size);
      try {
        write_one(path, c);
      } catch (const InputError& error) {
        const std::string line = error.what();
        return line.find("a.h5: cannot be written: ") != std::string::npos &&
                       line.find("(File too large)") != std::string::npos &&
                       line.find('\n') == std::string::npos
                   ? 2
                   : 3;
      }
      return 0;
    });
    const bool either = limit >= whole && limit < whole + kScratch;
    ASSERT_TRUE(status == (limit < whole ? 2 : 0) || (either && status == 2))
        << status << ", " << limit << " of " << whole;
    EXPECT_THAT(folder.entries(), ElementsAre("a.h5"));
    if (status == 2) {
      ++refused;
      EXPECT_EQ(test::file_bytes(path), "an older file");
    }
  }
  EXPECT_GT(refused, 30);
  EXPECT_EQ(list_captures(path).size(), 1U);
}

/// HDF5 1.10.8 crashes where it copies a group whose attributes lie outside its header.
TEST(WriteCapture, GroupsCanBeCopiedByHdf5) {
  const TemporaryFolder folder;
  Capture c = full_capture(Layout::bshd);
  for (int i = 0; i < 40; ++i) c.problem.attributes["remark_" + std::to_string(i)] = std::int64_t{i};
  CaptureWriter writer(folder / "a.h5");
  writer.write_capture("/", c.problem, c.recorded);
  writer.write_capture("/step/layer", c.problem, c.recorded);
  writer.commit();
  for (const std::string group : {"/", "/step/layer"}) {
    EXPECT_EQ(in_child([&] {
                const Handle from(H5Fopen((folder / "a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
                const Handle to(H5Fcreate((folder / "b.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT),
                                H5Fclose);
                const herr_t done =
                    H5Ocopy(from.get(), group.c_str(), to.get(), "copy", H5P_DEFAULT, H5P_DEFAULT);
                return done < 0 ? 1 : 0;
              }),
              0)
        << group;
    const Capture copy = read_capture((folder / "b.h5") + ":/copy");
    EXPECT_TRUE(same_bits(copy.problem.q, c.problem.q));
    EXPECT_EQ(copy.problem.integer("remark_39", 0), 39);
  }
}

TEST(WriteCapture, AttributesOfAnySize) {
  const TemporaryFolder folder;
  Capture c = full_capture(Layout::bshd);
  c.problem.attributes["log"] = std::string(70'000, 'x');  // more than an object's header holds
  write_one(folder / "a.h5", c);
  EXPECT_TRUE(read_capture(folder / "a.h5").problem.text("log") == std::string(70'000, 'x'));
}

TEST(WriteCapture, AKilledProcessLeavesNothing) {
  const TemporaryFolder folder;
  for (const int signal : {SIGKILL, SIGTERM, SIGINT, SIGSEGV}) {
    const int status = in_child([&] {
      CaptureWriter writer(folder / "a.h5");
      writer.write_capture("/", full_capture(Layout::bshd).problem, {});
      ::signal(SIGSEGV, SIG_DFL);
      ::kill(::getpid(), signal);
      return 0;
    });
    EXPECT_EQ(status, 1000 + signal);
    EXPECT_TRUE(folder.entries().empty()) << signal;
  }
}

TEST(Interrupt, TheFirstSignalIsAnExceptionAtASafePlace) {
  const TemporaryFolder folder;
  for (const int signal : {SIGTERM, SIGINT}) {
    const int status = in_child([&] {
      install_interrupt_handlers();
      throw_if_interrupted();
      try {
        CaptureWriter writer(folder / "a.h5");
        ::raise(signal);
        writer.write_capture("/", full_capture(Layout::bshd).problem,
                             {});  // notices it before the first tensor
      } catch (const Interrupted& interrupted) {
        return interrupted.signal() == signal ? 42 : 43;
      }
      return 0;
    });
    EXPECT_EQ(status, 42);
    EXPECT_TRUE(folder.entries().empty());
  }
}

TEST(Interrupt, CommitIsTheLastChance) {
  const TemporaryFolder folder;
  const int status = in_child([&] {
    install_interrupt_handlers();
    try {
      CaptureWriter writer(folder / "a.h5");
      writer.write_capture("/", full_capture(Layout::bshd).problem, {});
      ::raise(SIGINT);
      writer.commit();
    } catch (const Interrupted&) {
      return 42;
    }
    return 0;
  });
  EXPECT_EQ(status, 42);
  EXPECT_TRUE(folder.entries().empty());
}

TEST(Interrupt, ASecondSignalRemovesTemporaryFilesAndEndsAtOnce) {
  const TemporaryFolder folder;
  test::write_bytes(folder / "half-written.tmp", "x");
  test::write_bytes(folder / "other", "y");
  const int status = in_child([&] {
    install_interrupt_handlers();
    detail::forget_temporary(detail::remember_temporary(folder / "other"));
    detail::remember_temporary(folder / "half-written.tmp");
    ::raise(SIGINT);
    ::raise(SIGINT);
    return 0;
  });
  EXPECT_EQ(status, 128 + SIGINT);
  EXPECT_THAT(folder.entries(), ElementsAre("other"));
}

TEST(Interrupt, AProbeIsInterruptible) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  write_one(path, full_capture(Layout::bshd));
  const int status = in_child([&] {
    install_interrupt_handlers();
    ::raise(SIGINT);
    try {
      read_capture(path);
    } catch (const Interrupted&) {
      return 42;
    }
    return 0;
  });
  EXPECT_EQ(status, 42);
}

TEST(OutputFile, TextIsWrittenWholeOrNotAtAll) {
  const TemporaryFolder folder;
  const std::string path = folder / "page.html";
  write_text_file(path, "first");
  write_text_file(path, std::string(100000, 'x'));
  EXPECT_EQ(test::file_bytes(path), std::string(100000, 'x'));
  EXPECT_THAT(refusal([&] { write_text_file(path, "z", {path}); }), HasSubstr("it is the input"));
  EXPECT_THAT(folder.entries(), ElementsAre("page.html"));
}

TEST(OutputFile, HiddenNamesWhereThereAreNoNamelessFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  const auto fill = [](const OutputFile& file) { ASSERT_EQ(::write(file.descriptor(), "new", 3), 3); };
  for (const bool old : {false, true}) {
    if (old) test::write_bytes(path, "old");
    {
      const OutputFile file(path, {}, OutputFile::Until::named);
      fill(file);
      EXPECT_EQ(folder.entries().size(), old ? 2U : 1U);
      EXPECT_EQ(folder.entries()[0].substr(0, 3), ".a.");
    }
    EXPECT_EQ(folder.entries().size(), old ? 1U : 0U);
    OutputFile file(path, {}, OutputFile::Until::named);
    fill(file);
    file.commit();
    EXPECT_EQ(test::file_bytes(path), "new");
    EXPECT_THAT(folder.entries(), ElementsAre("a"));
  }
  // A second signal removes the hidden file too.
  const int status = in_child([&] {
    install_interrupt_handlers();
    const OutputFile file(path, {}, OutputFile::Until::named);
    ::raise(SIGTERM);
    ::raise(SIGTERM);
    return 0;
  });
  EXPECT_EQ(status, 128 + SIGTERM);
  EXPECT_THAT(folder.entries(), ElementsAre("a"));
}

TEST(OutputFile, FollowsTheUmask) {
  const TemporaryFolder folder;
  const mode_t old = ::umask(027);
  write_text_file(folder / "a", "x");
  {
    OutputFile file(folder / "b", {}, OutputFile::Until::named);
    file.commit();
  }
  ::umask(old);
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(static_cast<unsigned>(std::filesystem::status(folder / name).permissions()), 0640U) << name;
  }
}

}  // namespace
}  // namespace bitattn
