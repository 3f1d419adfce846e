// Reading: whatever storage, format, width or kind of string a capture uses, the same words and fields come
// out.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using test::Builder;
using test::Storage;
using test::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::uint16_t> counted(std::size_t n, std::uint16_t first) {
  std::vector<std::uint16_t> words(n);
  std::iota(words.begin(), words.end(), first);
  return words;
}

TEST(ReadCapture, AnyStorageInOldAndNewFormat) {
  const TemporaryFolder folder;
  for (const bool newest : {false, true}) {
    for (const Storage storage :
         {Storage::contiguous, Storage::compact, Storage::chunked, Storage::filtered}) {
      const std::string path =
          folder / ("s" + std::to_string(static_cast<int>(storage)) + (newest ? "n.h5" : "o.h5"));
      Builder file(path, newest);
      file.capture("/", {}, 0x7f80, storage);
      file.close();
      const Capture c = read_capture(path);
      const Problem& p = c.problem;
      EXPECT_EQ(c.name, path);
      EXPECT_EQ(p.batch, 1U);
      EXPECT_EQ(p.seqlen_q, 3U);
      EXPECT_EQ(p.seqlen_k, 5U);
      EXPECT_EQ(p.heads_q, 2U);
      EXPECT_EQ(p.heads_kv, 1U);
      EXPECT_EQ(p.head_dim, 8U);
      EXPECT_EQ(p.softmax_scale, 0.125);
      EXPECT_EQ(p.q.data, counted(48, 0x7f80 + 100));
      EXPECT_EQ(p.dout.data, counted(48, 0x7f80 + 200));
      EXPECT_EQ(c.recorded.out.data, counted(48, 0x7f80 + 300));
      EXPECT_EQ(c.recorded.dq.data, counted(48, 0x7f80 + 400));
      EXPECT_EQ(p.k.data, counted(40, 0x7f80 + 500));
      EXPECT_EQ(p.v.data, counted(40, 0x7f80 + 600));
      EXPECT_EQ(c.recorded.dk.data, counted(40, 0x7f80 + 700));
      EXPECT_EQ(c.recorded.dv.data, counted(40, 0x7f80 + 800));
      EXPECT_EQ(c.recorded.lse.shape, (std::vector<std::size_t>{1, 2, 3}));
      EXPECT_EQ(c.recorded.lse.data, (std::vector<float>{0.25F, 1.25F, 2.25F, 3.25F, 4.25F, 5.25F}));
      EXPECT_EQ(c.recorded.backend, "recorded");
      EXPECT_TRUE(c.has_recorded());
      check_problem(p, path);
    }
  }
}

TEST(ReadCapture, AllWordsSurvive) {
  const TemporaryFolder folder;
  const std::string path = folder / "words.h5";
  Builder file(path);
  file.bf16("/q", {1, 256, 1, 256}, 0, Storage::filtered);  // every one of the 65536 words
  file.bf16("/k", {1, 256, 1, 256}, 1, Storage::contiguous);
  file.bf16("/v", {1, 256, 1, 256}, 2, Storage::chunked);
  file.real("/", "softmax_scale", 1);
  file.close();
  const Capture c = read_capture(path);
  EXPECT_EQ(c.problem.q.data, counted(65536, 0));
  EXPECT_EQ(c.problem.k.data, counted(65536, 1));
  EXPECT_EQ(c.problem.v.data, counted(65536, 2));
  EXPECT_FALSE(c.has_recorded());
  EXPECT_TRUE(c.problem.dout.empty());
}

TEST(ReadCapture, DefaultsOfAbsentAttributes) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {});
  file.close();
  const Problem p = read_capture(folder / "a.h5").problem;
  EXPECT_FALSE(p.causal);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_EQ(p.softcap, 0);
  EXPECT_TRUE(p.deterministic);
  EXPECT_EQ(p.causal_alignment, CausalAlignment::bottom_right);
  EXPECT_EQ(p.layout, Layout::bshd);
  EXPECT_TRUE(p.attributes.empty());
}

TEST(ReadCapture, FlagsOfAnyWidthAndBooleans) {
  const TemporaryFolder folder;
  int n = 0;
  for (const hid_t type : {H5T_STD_I8LE, H5T_STD_U8LE, H5T_STD_I16BE, H5T_STD_I32LE, H5T_STD_U32LE,
                           H5T_STD_I64BE, H5T_STD_U64LE, hid_t{-1}}) {
    for (const bool on : {false, true}) {
      const std::string path = folder / (std::to_string(n++) + ".h5");
      Builder file(path);
      file.capture("/", {});
      for (const char* flag : {"causal", "deterministic"}) {
        type < 0 ? file.boolean("/", flag, on) : file.integer("/", flag, on ? 1 : 0, type);
      }
      file.close();
      const Problem p = read_capture(path).problem;
      EXPECT_EQ(p.causal, on);
      EXPECT_EQ(p.deterministic, on);
    }
  }
  EXPECT_EQ(n, 16);
}

TEST(ReadCapture, NumbersOfAnyWidth) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {});
  file.integer("/", "softmax_scale", 2, H5T_STD_U8LE);
  file.real("/", "softcap", 30.5, H5T_IEEE_F32BE);
  file.integer("/", "window_left", -1, H5T_STD_I8LE);
  file.integers("/", "window_right", {7});  // one element, but not a scalar
  file.real("/", "softmax_scale_f32", 0.0883883461356163, H5T_IEEE_F32LE);
  file.close();
  const Problem p = read_capture(folder / "a.h5").problem;
  EXPECT_EQ(p.softmax_scale, 2.0);
  EXPECT_EQ(p.softcap, 30.5);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, 7);
  EXPECT_EQ(std::get<double>(p.attributes.at("softmax_scale_f32")), static_cast<double>(0.0883883461356163F));
}

TEST(ReadCapture, StringsOfAnyKind) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {});
  file.variable_text("/", "causal_alignment", "top-left");
  file.variable_text("/", "layout", "BSHD");
  file.fixed_text("/", "kernel", "my kernel", H5T_STR_NULLTERM);
  file.fixed_text("/", "device", "NVIDIA H200", H5T_STR_NULLPAD);
  file.fixed_text("/", "regime", "late", H5T_STR_SPACEPAD);
  file.variable_text("/", "empty", "");
  file.close();
  const Problem p = read_capture(folder / "a.h5").problem;
  EXPECT_EQ(p.causal_alignment, CausalAlignment::top_left);
  EXPECT_EQ(p.text("kernel"), "my kernel");
  EXPECT_EQ(p.text("device"), "NVIDIA H200");
  EXPECT_EQ(p.text("regime"), "late");
  EXPECT_EQ(p.text("empty", "absent"), "");
}

TEST(ReadCapture, OtherAttributesAreKept) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {});
  file.integer("/", "step", 24000, H5T_STD_I32LE);
  file.unsigned_integer("/", "seed", ~std::uint64_t{0});  // 2^64 - 1: more than int64 holds
  file.real("/", "loss", 0.645);
  file.boolean("/", "good", true);
  file.integers("/", "heads", {3, 1, 4});
  file.close();
  const Problem p = read_capture(folder / "a.h5").problem;
  EXPECT_EQ(p.integer("step", 0), 24000);
  EXPECT_EQ(p.text("seed"), "18446744073709551615");
  EXPECT_EQ(std::get<double>(p.attributes.at("loss")), 0.645);
  EXPECT_EQ(p.integer("good", 0), 1);
  const AttributeArray& heads = p.array_attributes.at("heads");
  EXPECT_EQ(heads.shape, std::vector<std::size_t>{3});
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(heads.values), (std::vector<std::int64_t>{3, 1, 4}));
  EXPECT_FALSE(p.attributes.contains("softmax_scale")) << "has a field of its own";
}

TEST(ReadCapture, LseLosesATrailingAxisAndPaddingRows) {
  const TemporaryFolder folder;
  int n = 0;
  for (const std::vector<std::size_t>& shape :
       {std::vector<std::size_t>{1, 2, 3, 1}, std::vector<std::size_t>{1, 2, 32},
        std::vector<std::size_t>{1, 2, 32, 1}}) {
    const std::string path = folder / (std::to_string(n++) + ".h5");
    Builder file(path);
    file.capture("/", {});
    file.remove("/lse");
    file.fp32("/lse", shape);
    file.close();
    const Fp32Tensor lse = read_capture(path).recorded.lse;
    EXPECT_EQ(lse.shape, (std::vector<std::size_t>{1, 2, 3}));
    const auto second = static_cast<float>(shape[2]) + 0.25F;
    EXPECT_THAT(lse.data, ElementsAre(0.25F, 1.25F, 2.25F, second, second + 1, second + 2));
  }
}

TEST(ReadCapture, OneQueryRowKeepsItsAxis) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {1, 1, 5, 2, 1, 8});  // lse [1, 2, 1]: the trailing 1 is the row axis
  file.close();
  EXPECT_EQ(read_capture(folder / "a.h5").recorded.lse.shape, (std::vector<std::size_t>{1, 2, 1}));
}

void packed_capture(Builder& file, hid_t offsets_type) {
  file.bf16("/q", {7, 4, 16}, 1);
  file.bf16("/k", {9, 2, 16}, 2);
  file.bf16("/v", {9, 2, 24}, 3);
  file.bf16("/dout", {7, 4, 24}, 4);
  std::vector<std::int64_t> q{0, 4, 4, 7};
  std::vector<std::int64_t> k{0, 2, 9, 9};
  for (auto* offsets : {&q, &k}) {
    H5Tconvert(H5T_NATIVE_INT64, offsets_type, 4, offsets->data(), nullptr, H5P_DEFAULT);
  }
  file.dataset("/cu_seqlens_q", offsets_type, {4}, q.data());
  file.dataset("/cu_seqlens_k", offsets_type, {4}, k.data());
  file.fp32("/lse", {4, 7});
  file.real("/", "softmax_scale", 0.25);
}

TEST(ReadCapture, PackedSequences) {
  const TemporaryFolder folder;
  int n = 0;
  for (const hid_t type : {H5T_STD_I32LE, H5T_STD_I64LE, H5T_STD_U16BE}) {
    for (const bool named : {false, true}) {
      const std::string path = folder / (std::to_string(n++) + ".h5");
      Builder file(path);
      packed_capture(file, type);
      if (named) file.variable_text("/", "layout", "THD");
      file.close();
      const Capture c = read_capture(path);
      const Problem& p = c.problem;
      EXPECT_EQ(p.layout, Layout::thd);
      EXPECT_EQ(p.batch, 3U);
      EXPECT_EQ(p.seqlen_q, 4U);
      EXPECT_EQ(p.seqlen_k, 7U);
      EXPECT_EQ(p.head_dim, 16U);
      EXPECT_EQ(p.head_dim_v, 24U);
      EXPECT_THAT(p.cu_seqlens_q, ElementsAre(0, 4, 4, 7));
      EXPECT_THAT(p.cu_seqlens_k, ElementsAre(0, 2, 9, 9));
      EXPECT_EQ(c.recorded.lse.shape, (std::vector<std::size_t>{4, 7}));
      check_problem(p, path);
    }
  }
}

TEST(ReadCapture, EmptySequences) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {2, 3, 0, 2, 1, 8});
  file.close();
  const Capture no_keys = read_capture(folder / "a.h5");
  EXPECT_EQ(no_keys.problem.seqlen_k, 0U);
  EXPECT_EQ(no_keys.problem.k.shape, (std::vector<std::size_t>{2, 0, 1, 8}));
  EXPECT_TRUE(no_keys.problem.k.data.empty());
  EXPECT_EQ(no_keys.recorded.out.size(), 96U);

  Builder other(folder / "b.h5");
  other.capture("/", {2, 0, 3, 2, 1, 8});
  other.close();
  EXPECT_EQ(read_capture(folder / "b.h5").problem.seqlen_q, 0U);
}

TEST(ReadCapture, IntermediatesAndUncastValues) {
  const TemporaryFolder folder;
  Builder file(folder / "a.h5");
  file.capture("/", {1, 3, 5, 2, 1, 72});
  file.fp32("/dpsum", {1, 2, 64});
  file.fp32("/lse_log2", {1, 2, 64});
  file.fp32("/dq_accum", {1, 2, 64, 96});
  file.fp32("/dk_accum", {1, 1, 128, 96});
  file.fp32("/dv_accum", {1, 1, 128, 96});
  const std::vector<double> exact(2 * 3, 1.0 / 3);
  file.dataset("/uncast/lse", H5T_IEEE_F64LE, {1, 2, 3}, exact.data());
  file.integer("/", "dq_order_fixed", 0);
  file.close();
  const Result r = read_capture(folder / "a.h5").recorded;
  EXPECT_EQ(r.intermediates.dpsum.shape, (std::vector<std::size_t>{1, 2, 64}));
  EXPECT_EQ(r.intermediates.dq_accum.shape, (std::vector<std::size_t>{1, 2, 64, 96}));
  EXPECT_EQ(r.intermediates.dq_accum.data[1], 1.25F);
  EXPECT_EQ(r.intermediates.dv_accum.size(), 128U * 96);
  EXPECT_EQ(r.uncast.lse.data, exact);
  EXPECT_TRUE(r.uncast.out.empty());
  EXPECT_FALSE(r.dq_order_fixed);
  EXPECT_TRUE(r.dkv_order_fixed);
}

TEST(ListCaptures, EveryGroupWithLinksAndCycles) {
  const TemporaryFolder folder;
  const std::string path = folder / "many.h5";
  Builder file(path);
  file.capture("/step_2/layer_1", {}, 1);
  file.capture("/step_10/layer_0", {}, 2);
  file.capture("/flash", {}, 3);
  file.group("/other/q");  // groups of these names are no tensors
  // As in files whose kernels share their inputs: hard links for q and k, a soft link for v.
  file.group("/cudnn");
  H5Lcreate_hard(file.file(), "/flash/q", file.file(), "/cudnn/q", H5P_DEFAULT, H5P_DEFAULT);
  H5Lcreate_hard(file.file(), "/flash/k", file.file(), "/cudnn/k", H5P_DEFAULT, H5P_DEFAULT);
  H5Lcreate_soft("/flash/v", file.file(), "/cudnn/v", H5P_DEFAULT, H5P_DEFAULT);
  file.real("/cudnn", "softmax_scale", 0.5);
  // A group that holds itself, and a link to nowhere.
  H5Lcreate_hard(file.file(), "/flash", file.file(), "/flash/self", H5P_DEFAULT, H5P_DEFAULT);
  H5Lcreate_soft("/nowhere", file.file(), "/dangling", H5P_DEFAULT, H5P_DEFAULT);
  file.close();
  EXPECT_THAT(list_captures(path), ElementsAre(path + ":/cudnn", path + ":/flash", path + ":/step_10/layer_0",
                                               path + ":/step_2/layer_1"));
  EXPECT_EQ(read_capture(path + ":/cudnn").problem.v.data, read_capture(path + ":/flash").problem.v.data);
  EXPECT_EQ(read_capture(path + ":/cudnn").problem.softmax_scale, 0.5);
  EXPECT_THAT(list_captures(path + ":/step_2/layer_1/"), ElementsAre(path + ":/step_2/layer_1"));
  EXPECT_EQ(read_capture(path + "://step_2//layer_1").name, path + ":/step_2/layer_1");
  EXPECT_THROW(list_captures(path + ":/step_2"), InputError);
  EXPECT_THROW(list_captures(path + ":/"), InputError);
}

TEST(ListCaptures, RootCaptureHasThePlainName) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  Builder file(path);
  file.capture("/", {});
  file.capture("/second", {});
  file.close();
  EXPECT_THAT(list_captures(path), ElementsAre(path, path + ":/second"));
  EXPECT_THAT(list_captures(path + ":/"), ElementsAre(path));
}

TEST(ListAttributes, GroupsAndTheirAttributesWithoutTheirTensors) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  Builder file(path);
  file.capture("/", {});
  file.capture("/h.9", {});
  file.real("/h.9", "step", 7);
  H5Ldelete(file.file(), "/h.9/k", H5P_DEFAULT);
  file.group("/h.9/k");  // no tensor: to be refused by whoever reads it
  file.close();
  const std::vector<ListedCapture> listed = list_attributes(path);
  ASSERT_EQ(listed.size(), 2U);
  EXPECT_EQ(listed[0].name, path);
  EXPECT_EQ(listed[0].group, "/");
  EXPECT_EQ(listed[1].name, path + ":/h.9");
  EXPECT_EQ(listed[1].group, "/h.9");
  EXPECT_EQ(listed[1].attributes.at("step"), Attribute(7.0));
  EXPECT_EQ(listed[0].attributes.count("step"), 0U);
  EXPECT_THROW(read_capture(listed[1].name), InputError);
  ASSERT_EQ(list_attributes(path + ":/h.9/").size(), 1U);
  EXPECT_THROW(list_attributes(path + ":/h.8"), InputError);
  EXPECT_THROW(list_attributes(folder / "none.h5"), InputError);
}

TEST(CaptureNames, FilesWhoseNamesHoldColons) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "x:");
  const std::string path = folder / "x:/run.h5";
  Builder file(path);
  file.capture("/g", {});
  file.close();
  EXPECT_EQ(parse_capture_name(path).file, path);
  EXPECT_EQ(parse_capture_name(path).group, "");
  EXPECT_EQ(parse_capture_name(path + ":/g").file, path);
  EXPECT_EQ(parse_capture_name(path + ":/g").group, "/g");
  EXPECT_EQ(parse_capture_name("none.h5:/g//h/").group, "/g/h");
  EXPECT_EQ(parse_capture_name("none.h5:/").group, "/");
  EXPECT_EQ(parse_capture_name("none.h5").group, "");
  EXPECT_THAT(list_captures(path), ElementsAre(path + ":/g"));
}

TEST(ReadCapture, AFileThatChangedIsLookedAtAgain) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  {
    Builder file(path);
    file.capture("/", {});
  }
  EXPECT_EQ(read_capture(path).problem.seqlen_q, 3U);
  {
    Builder file(path);
    file.capture("/", {1, 4, 5, 2, 1, 8});
  }
  EXPECT_EQ(read_capture(path).problem.seqlen_q, 4U);
  test::write_bytes(path, "no HDF5 any more");
  EXPECT_THROW(read_capture(path), InputError);
}

TEST(ReadCapture, ReadOnlyFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  Builder file(path);
  file.capture("/", {});
  file.close();
  std::filesystem::permissions(path, std::filesystem::perms::owner_read);
  EXPECT_EQ(list_captures(path).size(), 1U);
}

/// Every capture of a folder, read and checked; and the words of one relation that holds in all
/// FlashAttention-3 goldens.
void read_goldens(const std::string& root) {
  std::size_t captures = 0;
  std::size_t rows = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".h5") continue;
    for (const std::string& name : list_captures(entry.path())) {
      const Capture c = read_capture(name);
      check_problem(c.problem, name);
      EXPECT_TRUE(c.has_recorded()) << name;
      EXPECT_EQ(c.recorded.lse.shape, c.problem.row_shape()) << name;
      EXPECT_FALSE(c.problem.text("kernel").empty()) << name;
      ++captures;
      const Fp32Tensor& log2 = c.recorded.intermediates.lse_log2;
      if (log2.empty() || c.problem.layout == Layout::thd) continue;
      // lse_log2 = fp32(lse * log2 e), and 0 where lse is -inf.
      const float log2e = std::bit_cast<float>(0x3fb8aa3bU);
      for (std::size_t r = 0; r < c.recorded.lse.size(); ++r) {
        const std::size_t padded = log2.shape.back();
        const float lse = c.recorded.lse.data[r];
        const float found = log2.data[r / c.problem.seqlen_q * padded + r % c.problem.seqlen_q];
        const float expected = std::isinf(lse) && lse < 0 ? 0.0F : lse * log2e;
        if (std::isnan(expected)) continue;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(expected))
            << name << " row " << r;
        ++rows;
      }
    }
  }
  EXPECT_GT(captures, 10U);
  EXPECT_GT(rows, 1000U);
  std::printf("%zu captures, %zu rows\n", captures, rows);
}

TEST(ReadCapture, BundledGoldens) {
  read_goldens(BITATTN_BUNDLED_GOLDENS);
}

TEST(ReadCapture, AllGoldens) {
  const char* root = std::getenv("BITATTN_GOLDENS");
  if (root == nullptr) GTEST_SKIP() << "BITATTN_GOLDENS is not set";
  read_goldens(root);
}

}  // namespace
}  // namespace bitattn
