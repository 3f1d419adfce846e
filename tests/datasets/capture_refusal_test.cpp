// Bad input: each case ends in one clear line that names the file, what was found and what was expected.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <new>
#include <utility>

#include "datasets/capture_file.hpp"
#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/reading_child.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn {
namespace {

using hdf5::Handle;
using test::Builder;
using test::Storage;
using test::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// The one line that a name is refused with, "accepted" where it is not.
std::string refusal(const std::string& name) {
  try {
    for (const std::string& capture : list_captures(name)) read_capture(capture);
  } catch (const InputError& error) {
    const std::string line = error.what();
    EXPECT_THAT(line, Not(HasSubstr("\n")));
    EXPECT_LT(line.size(), 600U);
    return line;
  }
  return "accepted";
}

/// A good small capture, changed, and the line it is refused with; the path is cut off its beginning.
std::string refused(const std::function<void(Builder&)>& change, const Builder::Shape& shape = {}) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.h5";
  Builder file(path);
  file.capture("/", shape);
  change(file);
  file.close();
  const std::string line = refusal(path);
  if (line == "accepted") return line;
  EXPECT_THAT(line, StartsWith(path));
  return line.substr(path.size());
}

TEST(Refuse, TheUnchangedCaptureIsAccepted) {
  EXPECT_EQ(refused([](Builder&) {}), "accepted");
}

TEST(Refuse, WhatIsNoHdf5File) {
  const TemporaryFolder folder;
  EXPECT_THAT(refusal(folder / "none.h5"), HasSubstr("none.h5: cannot be opened: No such file or directory"));
  EXPECT_THAT(refusal(folder.path().string()), HasSubstr("is a folder, expected an HDF5 file"));
  test::write_bytes(folder / "empty.h5", "");
  EXPECT_THAT(refusal(folder / "empty.h5"), HasSubstr("is empty, expected an HDF5 file"));
  test::write_bytes(folder / "text.h5", std::string(5000, 'x'));
  EXPECT_THAT(refusal(folder / "text.h5"), HasSubstr("is not an HDF5 file"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(folder / "pipe"), HasSubstr("is not a regular file"));
  EXPECT_THAT(refusal(folder / "text.h5/x"), HasSubstr("cannot be opened: Not a directory"));
  if (::geteuid() != 0) {
    ::chmod((folder / "text.h5").c_str(), 0);
    EXPECT_THAT(refusal(folder / "text.h5"), HasSubstr("cannot be opened: Permission denied"));
  }
}

TEST(Refuse, TruncatedAtAnyPlace) {
  const TemporaryFolder folder;
  for (const bool newest : {false, true}) {
    Builder file(folder / "whole.h5", newest);
    file.capture("/", {}, 0x3f80, Storage::filtered);
    file.close();
    const std::string whole = test::file_bytes(folder / "whole.h5");
    for (std::size_t size = 1; size < whole.size(); size += 1 + whole.size() / 61) {
      const std::string path = folder / "cut.h5";
      test::write_bytes(path, whole.substr(0, size));
      EXPECT_THAT(refusal(path), AllOf(StartsWith(path + ": "), Not(HasSubstr("crashed")))) << size;
    }
  }
}

TEST(Refuse, NoCaptureInside) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  {
    Builder file(path);
    file.group("/x");
  }
  EXPECT_THAT(refusal(path), HasSubstr("a.h5: no capture: no group holds q, k and v"));
  EXPECT_THAT(refusal(path + ":/x"), HasSubstr("a.h5:/x: no capture: holds none of q, k, v"));
  EXPECT_THAT(refusal(path + ":/y"), HasSubstr("a.h5:/y: no such group in the file"));
}

TEST(Refuse, MissingTensors) {
  EXPECT_THAT(refused([](Builder& f) { f.remove("/v"); }),
              HasSubstr(": no capture: tensor v is missing beside q, k"));
  EXPECT_THAT(refused([](Builder& f) { f.remove("/q"); }), HasSubstr("tensor q is missing beside k, v"));
  EXPECT_THAT(refused([](Builder& f) { f.remove("/dout"); }),
              HasSubstr("tensor dout is missing, expected beside"));
  // Whole captures do not hide a broken one.
  EXPECT_THAT(refused([](Builder& f) {
                f.capture("/more", {});
                f.remove("/more/k");
              }),
              HasSubstr(":/more: no capture: tensor k is missing beside q, v"));
}

/// Replaces /q by the same shape in another type.
std::function<void(Builder&)> retyped(const std::string& tensor, hid_t type,
                                      const std::vector<std::size_t>& shape) {
  return [=](Builder& f) {
    f.remove(tensor);
    const std::vector<char> zeros(10000, 0);
    f.dataset(tensor, type, shape, zeros.data());
  };
}

TEST(Refuse, TypesThatAreNotTheDeclaredBf16) {
  const std::vector<std::size_t> shape{1, 3, 2, 8};
  constexpr const char* kExpected =
      "expected BF16 (2-byte little-endian float: sign bit 15, exponent 8 bits at 7 with bias "
      "127, mantissa 7 bits at 0, implied leading bit)";
  const auto expect = [&](hid_t type, const std::string& found) {
    EXPECT_THAT(refused(retyped("/q", type, shape)),
                AllOf(HasSubstr(": tensor q has type " + found + ", "), HasSubstr(kExpected)));
  };
  expect(H5T_IEEE_F32LE, "float32");
  expect(H5T_IEEE_F64LE, "float64");
  expect(H5T_IEEE_F32BE, "big-endian float32");
  expect(H5T_STD_U16LE, "16-bit little-endian unsigned integer");
  expect(H5T_STD_I16BE, "16-bit big-endian integer");
  expect(H5T_STD_B16LE, "16-bit bit field");
  const Handle opaque(H5Tcreate(H5T_OPAQUE, 2), H5Tclose);
  expect(opaque.get(), "16-bit opaque type");
  // IEEE half, as numpy's float16.
  const Handle half(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  H5Tset_fields(half.get(), 15, 10, 5, 0, 10);
  H5Tset_size(half.get(), 2);
  H5Tset_ebias(half.get(), 15);
  expect(half.get(), "little-endian float16 (IEEE half)");
  // BF16 with one property changed each.
  Handle big = hdf5::make_bf16_type();
  H5Tset_order(big.get(), H5T_ORDER_BE);
  expect(big.get(),
         "16-bit big-endian float (sign bit 15, exponent 8 bits at 7 with bias 127, mantissa 7 bits at 0)");
  Handle bias = hdf5::make_bf16_type();
  H5Tset_ebias(bias.get(), 126);
  expect(
      bias.get(),
      "16-bit little-endian float (sign bit 15, exponent 8 bits at 7 with bias 126, mantissa 7 bits at 0)");
  Handle norm = hdf5::make_bf16_type();
  H5Tset_norm(norm.get(), H5T_NORM_NONE);
  expect(
      norm.get(),
      "16-bit little-endian float (sign bit 15, exponent 8 bits at 7 with bias 127, mantissa 7 bits at 0, no "
      "implied leading bit)");
  Handle fields = hdf5::make_bf16_type();
  H5Tset_fields(fields.get(), 15, 8, 7, 0, 8);
  expect(
      fields.get(),
      "16-bit little-endian float (sign bit 15, exponent 7 bits at 8 with bias 127, mantissa 8 bits at 0)");
  const Handle wide = [] {
    Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
    H5Tset_fields(type.get(), 15, 7, 8, 0, 7);
    H5Tset_precision(type.get(), 16);
    return type;
  }();
  expect(
      wide.get(),
      "32-bit little-endian float (sign bit 15, exponent 8 bits at 7 with bias 127, mantissa 7 bits at 0)");
}

TEST(Refuse, OtherTensorsOfAWrongType) {
  EXPECT_THAT(refused(retyped("/out", H5T_IEEE_F32LE, {1, 3, 2, 8})),
              HasSubstr("tensor out has type float32, expected BF16"));
  EXPECT_THAT(refused(retyped("/lse", H5T_IEEE_F64LE, {1, 2, 3})),
              HasSubstr("tensor lse has type float64, expected float32 (little-endian)"));
  EXPECT_THAT(refused([](Builder& f) {
                f.remove("/dk");
                f.group("/dk");
              }),
              HasSubstr("tensor dk cannot be opened as a dataset"));
  EXPECT_THAT(refused([](Builder& f) {
                f.fp32("/uncast/out", {1, 3, 2, 8});
              }),
              HasSubstr("tensor uncast/out has type float32, expected float64 (little-endian)"));
}

std::function<void(Builder&)> reshaped(const std::string& tensor, const std::vector<std::size_t>& shape) {
  return [=](Builder& f) {
    f.remove(tensor);
    f.bf16(tensor, shape, 0);
  };
}

TEST(Refuse, WrongRanksShapesAndLengths) {
  EXPECT_THAT(refused(reshaped("/q", {3, 2, 8})),
              HasSubstr("tensor k has shape [1, 5, 1, 8], expected 3 axes"));
  EXPECT_THAT(refused([](Builder& f) {
                for (const char* name : {"/q", "/k", "/v"}) reshaped(name, {3, 2, 8})(f);
              }),
              HasSubstr("tensor cu_seqlens_q is missing, expected for layout THD"));
  EXPECT_THAT(refused(reshaped("/q", {6, 8})), HasSubstr("tensor q has shape [6, 8], expected 4 axes"));
  EXPECT_THAT(refused(reshaped("/k", {1, 5, 8})), HasSubstr("tensor k has shape [1, 5, 8], expected 4 axes"));
  EXPECT_THAT(refused(reshaped("/v", {1, 5, 1, 8, 1})),
              HasSubstr("tensor v has shape [1, 5, 1, 8, 1], expected 4 axes"));
  EXPECT_THAT(refused(reshaped("/k", {2, 5, 1, 8})),
              HasSubstr("tensor k has shape [2, 5, 1, 8], expected [1, 5, 1, 8]"));
  EXPECT_THAT(refused(reshaped("/k", {1, 5, 1, 16})),
              HasSubstr("tensor k has shape [1, 5, 1, 16], expected [1, 5, 1, 8]"));
  EXPECT_THAT(refused(reshaped("/v", {1, 6, 1, 8})),
              HasSubstr("tensor v has shape [1, 6, 1, 8], expected [1, 5, 1, 8]"));
  EXPECT_THAT(refused(reshaped("/v", {1, 5, 2, 8})), HasSubstr("tensor v has shape [1, 5, 2, 8]"));
  EXPECT_THAT(refused(reshaped("/dout", {1, 3, 1, 8})),
              HasSubstr("tensor dout has shape [1, 3, 1, 8], expected [1, 3, 2, 8]"));
  EXPECT_THAT(refused(reshaped("/out", {1, 4, 2, 8})),
              HasSubstr("tensor out has shape [1, 4, 2, 8], expected [1, 3, 2, 8]"));
  EXPECT_THAT(refused(reshaped("/dq", {1, 3, 2, 7})), HasSubstr("tensor dq has shape"));
  EXPECT_THAT(refused(reshaped("/dk", {1, 3, 2, 8})), HasSubstr("tensor dk has shape"));
  EXPECT_THAT(refused(reshaped("/dv", {5, 1, 1, 8})), HasSubstr("tensor dv has shape"));
  EXPECT_THAT(refused([](Builder& f) {
                f.remove("/lse");
                f.fp32("/lse", {1, 2, 2});
              }),
              HasSubstr("tensor lse has shape [1, 2, 2], expected [1, 2, 3], or more rows as padding"));
  EXPECT_THAT(refused([](Builder& f) {
                f.remove("/lse");
                f.fp32("/lse", {1, 2, 3, 2});
              }),
              HasSubstr("tensor lse has shape [1, 2, 3, 2]"));
  EXPECT_THAT(refused([](Builder& f) {
                f.fp32("/dpsum", {1, 2, 2});
              }),
              HasSubstr("tensor dpsum has shape [1, 2, 2]"));
  EXPECT_THAT(refused([](Builder& f) {
                f.fp32("/dq_accum", {1, 2, 64, 8});
              }),
              HasSubstr("tensor dq_accum has shape [1, 2, 64, 8], expected [1, 2, 64, 64]"));
  EXPECT_THAT(refused([](Builder& f) {
                f.fp32("/dk_accum", {1, 2, 128, 64});
              }),
              HasSubstr("tensor dk_accum has shape [1, 2, 128, 64], expected [1, 1, 128, 64]"));
}

TEST(Refuse, HeadsAndHeadSizes) {
  EXPECT_THAT(refused([](Builder&) {}, {1, 3, 5, 3, 2, 8}),
              HasSubstr("q has 3 heads and k has 2, expected a multiple of the KV heads"));
  EXPECT_THAT(refused([](Builder&) {}, {1, 3, 5, 1, 2, 8}), HasSubstr("q has 1 heads and k has 2"));
  EXPECT_THAT(refused([](Builder&) {}, {1, 3, 5, 0, 1, 8}), HasSubstr("q has 0 heads"));
  EXPECT_THAT(refused([](Builder&) {}, {1, 3, 5, 2, 1, 257}),
              HasSubstr("head size of q and k is 257, expected 1 to 256"));
  EXPECT_THAT(refused([](Builder&) {}, {1, 3, 5, 2, 1, 0}), HasSubstr("head size of q and k is 0"));
  EXPECT_THAT(refused([](Builder&) {}, {0, 3, 5, 2, 1, 8}), HasSubstr("batch is 0, expected at least 1"));
}

TEST(Refuse, Attributes) {
  const auto with = [](auto change) { return refused([=](Builder& f) { change(f); }); };
  EXPECT_THAT(with([](Builder& f) { H5Adelete(f.file(), "softmax_scale"); }),
              HasSubstr(": attribute softmax_scale is missing, expected a number"));
  EXPECT_THAT(with([](Builder& f) { f.real("/", "softmax_scale", 0); }),
              HasSubstr("softmax_scale is 0, expected a finite number above 0"));
  EXPECT_THAT(with([](Builder& f) { f.real("/", "softmax_scale", -0.125); }),
              HasSubstr("softmax_scale is -0.125"));
  EXPECT_THAT(
      with([](Builder& f) { f.real("/", "softmax_scale", std::numeric_limits<double>::quiet_NaN()); }),
      HasSubstr("softmax_scale is nan"));
  EXPECT_THAT(with([](Builder& f) { f.real("/", "softmax_scale", std::numeric_limits<double>::infinity()); }),
              HasSubstr("softmax_scale is inf"));
  EXPECT_THAT(with([](Builder& f) { f.variable_text("/", "softmax_scale", "1/8\n"); }),
              HasSubstr("attribute softmax_scale is \"1/8?\", expected a number"));
  EXPECT_THAT(with([](Builder& f) {
                f.integers("/", "softmax_scale", {1, 2});
              }),
              HasSubstr("attribute softmax_scale has shape [2], expected a number"));
  EXPECT_THAT(with([](Builder& f) { f.integer("/", "causal", 2); }),
              HasSubstr("attribute causal is 2, expected 0 or 1"));
  EXPECT_THAT(with([](Builder& f) { f.real("/", "causal", 1); }),
              HasSubstr("attribute causal is 1, expected 0 or 1 as integer"));
  EXPECT_THAT(with([](Builder& f) { f.variable_text("/", "causal", "yes"); }),
              HasSubstr("attribute causal is \"yes\""));
  EXPECT_THAT(with([](Builder& f) { f.integer("/", "window_left", -2); }),
              HasSubstr("attribute window_left is -2, expected -1 (no limit) or more"));
  EXPECT_THAT(with([](Builder& f) { f.integer("/", "window_right", std::int64_t{1} << 40U); }),
              HasSubstr("attribute window_right is 1099511627776"));
  EXPECT_THAT(with([](Builder& f) { f.unsigned_integer("/", "window_right", ~std::uint64_t{0}); }),
              HasSubstr("attribute window_right is \"18446744073709551615\""));
  EXPECT_THAT(with([](Builder& f) { f.real("/", "softcap", -1); }), HasSubstr("softcap is -1"));
  EXPECT_THAT(with([](Builder& f) { f.variable_text("/", "causal_alignment", "left"); }),
              HasSubstr("attribute causal_alignment is \"left\", expected bottom-right or top-left"));
  EXPECT_THAT(with([](Builder& f) { f.variable_text("/", "layout", "BHSD"); }),
              HasSubstr("attribute layout is \"BHSD\", expected BSHD or THD"));
  EXPECT_THAT(with([](Builder& f) { f.variable_text("/", "layout", "THD"); }),
              HasSubstr("tensor q has shape [1, 3, 2, 8], expected 3 axes, [tokens, heads, head size]"));
  EXPECT_THAT(with([](Builder& f) { f.integer("/", "schema_version", 2); }),
              HasSubstr("attribute schema_version is 2, expected 1"));
}

TEST(Refuse, AttributesOfTypesThatAreNoNumbers) {
  EXPECT_THAT(refused([](Builder& f) {
                const Handle type(H5Tcreate(H5T_COMPOUND, 8), H5Tclose);
                H5Tinsert(type.get(), "x", 0, H5T_STD_I64LE);
                const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
                const Handle a(
                    H5Acreate2(f.file(), "causal", type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT),
                    H5Aclose);
                const std::int64_t x = 1;
                H5Awrite(a.get(), type.get(), &x);
              }),
              HasSubstr("attribute causal has type 64-bit compound type, expected 0 or 1"));
}

TEST(Refuse, PackedSequencesThatDoNotFit) {
  const auto packed = [](const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& k) {
    const TemporaryFolder folder;
    Builder file(folder / "a.h5");
    file.bf16("/q", {7, 2, 8}, 1);
    file.bf16("/k", {9, 1, 8}, 2);
    file.bf16("/v", {9, 1, 8}, 3);
    file.real("/", "softmax_scale", 0.25);
    file.dataset("/cu_seqlens_q", H5T_STD_I64LE, {q.size()}, q.data());
    file.dataset("/cu_seqlens_k", H5T_STD_I64LE, {k.size()}, k.data());
    file.close();
    return refusal(folder / "a.h5");
  };
  EXPECT_EQ(packed({0, 7}, {0, 9}), "accepted");
  EXPECT_THAT(packed({0, 6}, {0, 9}), HasSubstr("cu_seqlens_q ends at 6, expected the number of tokens, 7"));
  EXPECT_THAT(packed({1, 7}, {0, 9}), HasSubstr("cu_seqlens_q[0] is 1, expected 0"));
  EXPECT_THAT(packed({0, 7}, {0, 5, 3, 9}),
              HasSubstr("cu_seqlens_k[2] is 3, expected at least the entry before it, 5"));
  EXPECT_THAT(packed({0, 7}, {0, 5, 9}), HasSubstr("expected 2 (sequences + 1) in both"));
  EXPECT_THAT(packed({0}, {0}), HasSubstr("cu_seqlens_q has 1 entries, expected at least 2"));
  EXPECT_THAT(packed({}, {}), HasSubstr("cu_seqlens_q has 0 entries"));
  EXPECT_THAT(packed({0, -3, 7}, {0, 4, 9}), HasSubstr("cu_seqlens_q[1] is -3, expected 0 to 2147483647"));
  EXPECT_THAT(packed({0, std::int64_t{1} << 32U}, {0, 9}), HasSubstr("cu_seqlens_q[1] is 4294967296"));
  EXPECT_THAT(refused([](Builder& f) {
                const std::int32_t offsets[2] = {0, 3};
                f.dataset("/cu_seqlens_q", H5T_STD_I32LE, {2}, offsets);
              }),
              HasSubstr("tensor cu_seqlens_q found, expected with layout THD only"));
}

/// A dataset that claims a shape and stores nothing, as a sparse or damaged file may.
void claim(Builder& f, const std::string& path, hid_t type, const std::vector<hsize_t>& dims,
           const std::vector<hsize_t>& chunk) {
  if (H5Lexists(f.file(), path.c_str(), H5P_DEFAULT) > 0) f.remove(path);
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
  const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_chunk(create.get(), static_cast<int>(chunk.size()), chunk.data());
  const Handle set(
      H5Dcreate2(f.file(), path.c_str(), type, space.get(), H5P_DEFAULT, create.get(), H5P_DEFAULT),
      H5Dclose);
  ASSERT_TRUE(set);
}

TEST(Refuse, AbsurdSizesTakeNoMemory) {
  const Handle bf16 = hdf5::make_bf16_type();
  const auto claimed = [&](const std::vector<hsize_t>& dims) {
    return refused([&](Builder& f) {
      for (const char* name : {"/q", "/k", "/v", "/dout", "/out", "/dq", "/dk", "/dv"}) {
        claim(f, name, bf16.get(), dims, {1, 1, 1, 8});
      }
      f.remove("/lse");
    });
  };
  EXPECT_THAT(claimed({1, 2000000000, 4096, 8}), HasSubstr("the tensors' shapes ask for"));
  EXPECT_THAT(claimed({1, 3000000000, 1, 8}),
              HasSubstr("has 3000000000 tokens, expected at most 2147483647"));
  EXPECT_THAT(claimed({1U << 31U, 1U << 31U, 1, 8}), HasSubstr("too many elements to count"));
  // A chunk far larger than its tensor: the library would take memory for the whole chunk.
  EXPECT_THAT(
      refused([&](Builder& f) {
        const std::vector<hsize_t> dims{1, 3, 2, 8};
        const std::vector<hsize_t> most{H5S_UNLIMITED, H5S_UNLIMITED, 2, 8};
        const std::vector<hsize_t> chunk{1, 100000000, 2, 8};
        f.remove("/q");
        const Handle space(H5Screate_simple(4, dims.data(), most.data()), H5Sclose);
        const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
        H5Pset_chunk(create.get(), 4, chunk.data());
        H5Dclose(H5Dcreate2(f.file(), "/q", bf16.get(), space.get(), H5P_DEFAULT, create.get(), H5P_DEFAULT));
      }),
      ::testing::AnyOf(HasSubstr("the tensors' shapes ask for"), std::string("accepted")));
}

TEST(Refuse, UnwrittenChunksReadAsZeros) {
  // As h5py's create_dataset without data: allowed.
  const Handle bf16 = hdf5::make_bf16_type();
  EXPECT_EQ(refused([&](Builder& f) {
              claim(f, "/out", bf16.get(), {1, 3, 2, 8}, {1, 1, 1, 8});
            }),
            "accepted");
}

TEST(Refuse, DamagedDataIsFoundByItsChecksum) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  Builder file(path);
  file.capture("/", {1, 300, 300, 1, 1, 64}, 0x3f80, Storage::filtered);
  file.close();
  std::string bytes = test::file_bytes(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x10);
  test::write_bytes(path, bytes);
  EXPECT_THAT(refusal(path), HasSubstr(": data of tensor "));
}

TEST(ReadingChild, AReadThatTakesTooLongIsTimedOut) {
  // No time at all: whoever waits for the child must not wait for its end.
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  {
    Builder file(path);
    file.capture("/", {});
  }
  ChildLimits limits;
  limits.bytes_per_second = 1e18;  // no further time for data
  check_in_child(path, "", limits);
  limits.seconds = 0.0005;
  try {
    check_in_child(path, "", limits);
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a.h5: reading made no progress for 0 s"));
  }
}

/// Makes q of a small capture a virtual dataset of `source`'s dout.
void make_q_virtual(const std::string& path, const std::string& source) {
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
  const std::array<hsize_t, 4> shape{1, 3, 2, 8};
  const Handle space(H5Screate_simple(4, shape.data(), nullptr), H5Sclose);
  const Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_virtual(list.get(), space.get(), source.c_str(), "/dout", space.get());
  H5Ldelete(file.get(), "/q", H5P_DEFAULT);
  const Handle type = hdf5::make_bf16_type();
  const Handle q(H5Dcreate2(file.get(), "/q", type.get(), space.get(), H5P_DEFAULT, list.get(), H5P_DEFAULT),
                 H5Dclose);
  ASSERT_GE(q.get(), 0);
}

TEST(ReadingChild, VirtualTensorsOfOtherFilesAreRefused) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  const std::string other = folder / "other.h5";
  for (const std::string& name : {path, other}) {
    Builder file(name);
    file.capture("/", {});
  }
  make_q_virtual(path, ".");  // of its own file: a tensor like any other
  EXPECT_EQ(refusal(path), "accepted");
  make_q_virtual(path, other);
  EXPECT_THAT(refusal(path), HasSubstr("tensor q keeps its data in another file"));
}

TEST(ReadingChild, LinksIntoOtherFilesLeadNowhere) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  const std::string other = folder / "other.h5";
  {
    Builder file(other);
    file.capture("/", {});
  }
  {
    Builder file(path);
    file.capture("/", {});
    file.remove("/q");
    H5Lcreate_external(other.c_str(), "/q", file.file(), "/q", H5P_DEFAULT, H5P_DEFAULT);
  }
  EXPECT_THROW(check_in_child(path, "", {}), InputError);
}

/// Holds every free block of this process's heap, so that a child forked from it has to ask the system for
/// all that it takes, whatever ran here before.
class NoFreeHeap {
 public:
  NoFreeHeap() {
    H5garbage_collect();
    ::mallopt(M_TOP_PAD, 0);
    for (std::size_t size = std::size_t{1} << 20U; size >= sizeof(Block); size /= 2) {
      while (true) {
        const Heap before = heap();
        void* memory = std::malloc(size);
        if (memory == nullptr) break;
        blocks_ = new (memory) Block{blocks_};
        if (heap() != before) break;
      }
    }
  }
  NoFreeHeap(const NoFreeHeap&) = delete;
  NoFreeHeap& operator=(const NoFreeHeap&) = delete;
  ~NoFreeHeap() {
    while (blocks_ != nullptr) {
      Block* next = blocks_->next;
      std::free(blocks_);
      blocks_ = next;
    }
    ::mallopt(M_TOP_PAD, 128 << 10);
  }

 private:
  struct Block {
    Block* next;
  };
  /// What the heap has from the system: where it ends, and how many blocks stand alone.
  using Heap = std::pair<void*, std::size_t>;
  static Heap heap() { return {::sbrk(0), ::mallinfo2().hblks}; }

  Block* blocks_ = nullptr;
};

TEST(ReadingChild, MemoryIsLimited) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's shadow memory leaves no room for a limit";
#endif
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  {
    Builder file(path);
    file.capture("/", {1, 4096, 4096, 1, 1, 64});
  }
  ChildLimits limits;
  limits.spare_memory = std::size_t{64} << 10U;
  {
    const NoFreeHeap none;
    EXPECT_THROW(check_in_child(path, "", limits), InputError);
  }
  EXPECT_NO_THROW(check_in_child(path, "", {}));
}

}  // namespace
}  // namespace bitattn
