#include "tests/datasets/damage.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>

#include "datasets/capture_file.hpp"
#include "datasets/regime.hpp"
#include "tests/datasets/hdf5_builder.hpp"

namespace bitattn::test {
namespace {

void with_attributes(Builder& file, const std::string& group) {
  file.boolean(group, "causal", true);
  file.integer(group, "window_left", 4, H5T_STD_I32LE);
  file.variable_text(group, "kernel", "flash-attention-3");
  file.fixed_text(group, "regime", "normal", H5T_STR_NULLPAD);
  file.variable_text(group, "causal_alignment", "bottom-right");
  file.integers(group, "heads", {1, 2, 3});
  file.real(group, "softcap", 20);
}

}  // namespace

std::vector<Sample> make_samples() {
  const TemporaryFolder folder;
  const std::string path = folder / "sample.h5";
  std::vector<Sample> samples;
  const auto add = [&](const std::string& name) { samples.push_back({name, test::file_bytes(path)}); };
  for (const bool newest : {false, true}) {
    for (const Storage storage :
         {Storage::contiguous, Storage::compact, Storage::chunked, Storage::filtered}) {
      Builder file(path, newest);
      file.capture("/", {}, 0x3f80, storage);
      with_attributes(file, "/");
      file.close();
      add((newest ? "new " : "old ") + std::to_string(static_cast<int>(storage)));
    }
    Builder groups(path, newest);
    groups.capture("/step_1/layer_0", {}, 1, Storage::filtered);
    groups.capture("/step_1/layer_1", {}, 2, Storage::contiguous);
    groups.group("/linked");
    for (const char* name : {"q", "k", "v"}) {
      H5Lcreate_hard(groups.file(), ("/step_1/layer_0/" + std::string(name)).c_str(), groups.file(),
                     ("/linked/" + std::string(name)).c_str(), H5P_DEFAULT, H5P_DEFAULT);
    }
    groups.real("/linked", "softmax_scale", 0.5);
    with_attributes(groups, "/linked");
    groups.close();
    add(newest ? "new groups" : "old groups");

    Builder packed(path, newest);
    packed.bf16("/q", {7, 2, 8}, 1);
    packed.bf16("/k", {9, 1, 8}, 2, Storage::filtered);
    packed.bf16("/v", {9, 1, 8}, 3);
    const std::int32_t offsets_q[3] = {0, 3, 7};
    const std::int32_t offsets_k[3] = {0, 9, 9};
    packed.dataset("/cu_seqlens_q", H5T_STD_I32LE, {3}, offsets_q);
    packed.dataset("/cu_seqlens_k", H5T_STD_I32LE, {3}, offsets_k, Storage::chunked);
    packed.fp32("/lse", {2, 7});
    packed.real("/", "softmax_scale", 0.25);
    packed.close();
    add(newest ? "new packed" : "old packed");
  }
  {
    GenerateOptions options;
    options.seqlen_q = options.seqlen_k = 20;
    options.head_dim = 16;
    options.heads_q = 2;
    const Problem problem = generate(options);
    CaptureWriter writer(path);
    writer.write_capture("/", problem, {});
    writer.write_capture("/a/b", problem, {});
    writer.write_finding("/", "residue", Fp64Tensor({1, 2, 20}), "1", "text", {"batch", "head", "query"});
    writer.commit();
    add("ours");
  }
  constexpr std::uintmax_t kSmall = 200000;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(BITATTN_BUNDLED_GOLDENS)) {
    if (entry.path().extension() == ".h5" && entry.file_size() < kSmall) {
      samples.push_back({entry.path().filename(), test::file_bytes(entry.path())});
    }
  }
  return samples;
}

namespace {

/// Places near the front and back of a file, where metadata tends to stand, as often as anywhere.
std::size_t any_place(Random& random, std::size_t size) {
  constexpr std::size_t kNear = 4096;
  switch (random.below(3)) {
    case 0:
      return random.below(std::min(size, kNear));
    case 1:
      return size - 1 - random.below(std::min(size, kNear));
    default:
      return random.below(size);
  }
}

/// A place just behind one of the library's signatures, where its metadata certainly stands.
std::size_t metadata_place(Random& random, const std::string& bytes) {
  static const char* const kSignatures[] = {"TREE", "HEAP", "SNOD", "OHDR", "OCHK",   "FRHP",
                                            "FHDB", "FHIB", "BTHD", "BTLF", "BTIN",   "GCOL",
                                            "FADB", "FAHD", "EAHD", "SMTB", "\211HDF"};
  const std::string signature = kSignatures[random.below(std::size(kSignatures))];
  const std::size_t at = bytes.find(signature, random.below(bytes.size()));
  const std::size_t found = at == std::string::npos ? bytes.find(signature) : at;
  if (found == std::string::npos) return any_place(random, bytes.size());
  return std::min(bytes.size() - 1, found + random.below(200));
}

void overwrite(std::string& bytes, std::size_t at, const void* data, std::size_t size) {
  std::memcpy(&bytes[at], data, std::min(size, bytes.size() - at));
}

void damage_once(std::string& bytes, Random& random) {
  if (bytes.empty()) return;
  const std::size_t at =
      random.below(2) == 0 ? metadata_place(random, bytes) : any_place(random, bytes.size());
  const std::size_t length = std::min(bytes.size() - at, std::size_t{1} << random.below(12));
  switch (random.below(10)) {
    case 0:
    case 1:
      bytes[at] = static_cast<char>(bytes[at] ^ (1U << random.below(8)));
      break;
    case 2:
    case 3:
      bytes[at] = static_cast<char>(random.below(256));
      break;
    case 4: {  // an integer that is likely to hurt
      const std::uint64_t values[] = {0,
                                      1,
                                      0xff,
                                      0xffff,
                                      0x7fffffff,
                                      0xffffffff,
                                      ~std::uint64_t{0} >> 1U,
                                      ~std::uint64_t{0},
                                      bytes.size(),
                                      bytes.size() - 8,
                                      at,
                                      std::uint64_t{1} << 40U};
      const std::uint64_t value = values[random.below(std::size(values))];
      overwrite(bytes, at, &value, std::size_t{1} << random.below(4));
      break;
    }
    case 5:
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), length, '\0');
      break;
    case 6:
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), length, '\377');
      break;
    case 7:
      bytes.resize(at);
      break;
    case 8: {  // another part of the file in this place
      const std::string part = bytes.substr(random.below(bytes.size()), length);
      overwrite(bytes, at, part.data(), part.size());
      break;
    }
    default:
      if (random.below(2) == 0) {
        bytes.erase(at, length);
      } else {
        bytes.insert(at, length, static_cast<char>(random.below(256)));
      }
  }
}

}  // namespace

std::string damaged(const std::vector<Sample>& samples, std::uint64_t seed, std::uint64_t i) {
  Random random(seed, i);
  std::string bytes = samples[i % samples.size()].bytes;
  for (std::size_t n = 1 + random.below(4); n > 0; --n) damage_once(bytes, random);
  return bytes;
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace bitattn::test
