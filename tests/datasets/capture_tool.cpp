// What the readers and writers make of a file, for comparison with h5py (h5py_test.py).
//
//   capture_tool digest NAME      each tensor and field of each capture: a line each
//   capture_tool rewrite IN OUT   all captures of IN, read and written again, and a finding beside each

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "datasets/capture_file.hpp"
#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"

namespace bitattn {
namespace {

template <class T>
void print_tensor(const char* name, const Tensor<T>& tensor) {
  if (tensor.empty()) return;
  std::uint64_t hash = 0xcbf29ce484222325U;
  std::string bytes(tensor.data.size() * sizeof(T), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), tensor.data.data(), bytes.size());
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  std::printf("%s", name);
  for (const std::size_t d : tensor.shape) std::printf(" %zu", d);
  std::printf(" %016" PRIx64 "\n", hash);
}

void digest(const std::string& name) {
  for (const std::string& one : list_captures(name)) {
    const Capture c = read_capture(one);
    const Problem& p = c.problem;
    std::printf("capture %s\n", one.c_str());
    std::printf("softmax_scale %.17g\ncausal %d\nwindow %d %d\nsoftcap %.17g\nheads %zu %zu\n",
                p.softmax_scale, p.causal ? 1 : 0, p.window_left, p.window_right, p.softcap, p.heads_q,
                p.heads_kv);
    print_tensor("q", p.q);
    print_tensor("k", p.k);
    print_tensor("v", p.v);
    print_tensor("dout", p.dout);
    print_tensor("out", c.recorded.out);
    print_tensor("dq", c.recorded.dq);
    print_tensor("dk", c.recorded.dk);
    print_tensor("dv", c.recorded.dv);
    print_tensor("lse", c.recorded.lse);
    print_tensor("dpsum", c.recorded.intermediates.dpsum);
    print_tensor("lse_log2", c.recorded.intermediates.lse_log2);
    print_tensor("dq_accum", c.recorded.intermediates.dq_accum);
  }
}

void rewrite(const std::string& in, const std::string& out) {
  CaptureWriter writer(out, {in});
  for (const std::string& name : list_captures(in)) {
    const Capture c = read_capture(name);
    const std::string group = parse_capture_name(name).group;
    writer.write_capture(group, c.problem, c.recorded);
    Fp64Tensor index(c.problem.row_shape());
    for (std::size_t i = 0; i < index.size(); ++i) index.data[i] = static_cast<double>(i);
    const std::vector<std::string> axes = c.problem.layout == Layout::bshd
                                              ? std::vector<std::string>{"batch", "head", "query"}
                                              : std::vector<std::string>{"head", "token"};
    writer.write_finding(group, "test/row_index", index, "1", "flat index of the row", axes);
  }
  writer.commit();
}

}  // namespace
}  // namespace bitattn

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::strcmp(argv[1], "digest") == 0) {
      bitattn::digest(argv[2]);
    } else if (argc == 4 && std::strcmp(argv[1], "rewrite") == 0) {
      bitattn::rewrite(argv[2], argv[3]);
    } else {
      return 2;
    }
  } catch (const bitattn::InputError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
