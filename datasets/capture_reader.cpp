#include "datasets/capture_reader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>

#include "datasets/attribute_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

using hdf5::Handle;
using hdf5::last_error;

// HDF5 would wait for ever on a pipe, and says little about files that are not its own.
void expect_readable_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw InputError(path + ": cannot be opened: " + std::string(std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) throw InputError(path + ": is a folder, expected an HDF5 file");
  if (!S_ISREG(status.st_mode)) throw InputError(path + ": is not a regular file, expected an HDF5 file");
  if (::access(path.c_str(), R_OK) != 0) {
    throw InputError(path + ": cannot be opened: " + std::string(std::strerror(errno)));
  }
  if (status.st_size == 0) throw InputError(path + ": is empty, expected an HDF5 file");
}

Handle open_file(const std::string& path) {
  expect_readable_file(path);
  if (H5Fis_hdf5(path.c_str()) <= 0) throw InputError(path + ": is not an HDF5 file");
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG);
  // A link into another file would make that file an input too, unknown to whoever guards inputs from being
  // written: without their class, such links lead nowhere.
  H5Lunregister(H5L_TYPE_EXTERNAL);
  Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!file) throw InputError(path + ": cannot be opened as HDF5" + last_error());
  return file;
}

/// Is a dataset with these properties virtual, and made of datasets of other files? "." is its own.
bool maps_another_file(hid_t list) {
  std::size_t count = 0;
  if (H5Pget_layout(list) != H5D_VIRTUAL || H5Pget_virtual_count(list, &count) < 0) return false;
  for (std::size_t n = 0; n < count; ++n) {
    std::array<char, 2> name{};
    if (H5Pget_virtual_filename(list, n, name.data(), name.size()) != 1 || name[0] != '.') return true;
  }
  return false;
}

bool holds(hid_t group, const char* name) {
  return H5Lexists(group, name, H5P_DEFAULT) > 0;
}

struct Groups {
  std::vector<std::string> names;
  const BeforeRead& before_read;
};

herr_t take_group(hid_t /*object*/, const char* name, const H5O_info_t* info, void* groups) {
  auto& list = *static_cast<Groups*>(groups);
  if (info->type == H5O_TYPE_GROUP) {
    if (list.before_read) list.before_read(0);
    list.names.push_back(std::strcmp(name, ".") == 0 ? "/" : "/" + std::string(name));
  }
  return 0;
}

/// Which of q, k and v a group holds, as "q, k"; and how many.
struct Held {
  std::string present, missing;
  int count = 0;
};
Held held_inputs(hid_t group) {
  Held held;
  for (const char* name : {"q", "k", "v"}) {
    const bool there = holds(group, name);
    std::string& list = there ? held.present : held.missing;
    list += (list.empty() ? "" : ", ") + std::string(name);
    held.count += there ? 1 : 0;
  }
  return held;
}

/// Groups that stand beside a capture may have axes of any name, q and k too.
bool belongs_to_a_result(const std::string& group) {
  const std::string inside = group + "/";
  return inside.find("/findings/") != std::string::npos || inside.find("/uncast/") != std::string::npos ||
         inside.find("/trace/") != std::string::npos;
}

std::string incomplete(const std::string& path, const std::string& group, const Held& held) {
  return full_name(path, group) + ": no capture: " +
         (held.present.empty() ? "holds none of q, k, v"
                               : "tensor " + held.missing + " is missing beside " + held.present);
}

/// A dataset that was opened and whose type and shape are known, but whose data was not read.
struct Dataset {
  std::string name;
  Handle id;
  std::vector<std::size_t> shape;
};

/// Reads one capture in three steps: attributes and shapes; checks, size included; data.
class GroupReader {
 public:
  GroupReader(const std::string& path, const std::string& group, const BeforeRead& before_read)
      : where_(full_name(path, group)), before_read_(before_read), file_(open_file(path)) {
    announce(0);
    group_ = Handle(H5Gopen2(file_.get(), group.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group_) fail("group cannot be opened" + last_error());
    const Held held = held_inputs(group_.get());
    if (held.count != 3) throw InputError(incomplete(path, group, held));
  }

  Capture read(std::size_t largest_bytes) {
    Capture capture;
    capture.name = where_;
    capture.recorded.backend = "recorded";
    read_attributes(capture.problem, capture.recorded);
    open_inputs(capture.problem);
    check_problem_without_data(capture.problem, where_);
    open_outputs(capture);
    refuse_larger_than(largest_bytes);
    announce(total_bytes_);
    read_data(capture);
    return capture;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw InputError(where_ + ": " + what); }
  void announce(std::size_t bytes) const {
    if (before_read_) before_read_(bytes);
  }

  // --- attributes

  template <class T>
  [[noreturn]] void fail_type(const std::string& name, const T& found, const char* expected) const {
    std::string text;
    if constexpr (std::is_same_v<T, std::string>) {
      text = '"' + printable(found, 40) + '"';
    } else if constexpr (std::is_same_v<T, double>) {
      text = shortest_text(found);
    } else {
      text = std::to_string(found);
    }
    fail("attribute " + name + " is " + text + ", expected " + expected);
  }

  /// Takes a known attribute out of the map; empty where it is absent.
  std::optional<Attribute> take(const std::string& name, const char* expected) {
    if (const auto other = attributes_.other.find(name); other != attributes_.other.end()) {
      fail("attribute " + name + " has type " + other->second + ", expected " + expected);
    }
    if (const auto array = attributes_.arrays.find(name); array != attributes_.arrays.end()) {
      fail("attribute " + name + " has shape " + shape_text(array->second.shape) + ", expected " + expected);
    }
    const auto found = attributes_.single.find(name);
    if (found == attributes_.single.end()) return std::nullopt;
    Attribute value = std::move(found->second);
    attributes_.single.erase(found);
    return value;
  }

  double take_number(const std::string& name, std::optional<double> fallback) {
    const std::optional<Attribute> value = take(name, "a number");
    if (!value) {
      if (!fallback) fail("attribute " + name + " is missing, expected a number");
      return *fallback;
    }
    if (const auto* number = std::get_if<double>(&*value)) return *number;
    if (const auto* number = std::get_if<std::int64_t>(&*value)) return static_cast<double>(*number);
    fail_type(name, std::get<std::string>(*value), "a number");
  }

  std::int64_t take_integer(const std::string& name, std::int64_t fallback, std::int64_t least,
                            std::int64_t most, const char* expected) {
    const std::optional<Attribute> value = take(name, expected);
    if (!value) return fallback;
    const auto* number = std::get_if<std::int64_t>(&*value);
    if (number == nullptr || *number < least || *number > most) {
      std::visit([&](const auto& v) { fail_type(name, v, expected); }, *value);
    }
    return *number;
  }

  bool take_flag(const std::string& name, bool fallback) {
    return take_integer(name, fallback ? 1 : 0, 0, 1, "0 or 1 as integer or boolean") == 1;
  }

  /// The index of the attribute's text among `choices`; fallback where it is absent.
  std::size_t take_choice(const std::string& name, const std::vector<std::string>& choices,
                          std::size_t fallback) {
    std::string expected;
    for (const std::string& choice : choices) expected += (expected.empty() ? "" : " or ") + choice;
    const std::optional<Attribute> value = take(name, expected.c_str());
    if (!value) return fallback;
    if (const auto* text = std::get_if<std::string>(&*value)) {
      const auto at = std::find(choices.begin(), choices.end(), *text);
      if (at != choices.end()) return static_cast<std::size_t>(at - choices.begin());
    }
    std::visit([&](const auto& v) { fail_type(name, v, expected.c_str()); }, *value);
    return fallback;
  }

  /// `notes` as bitattn writes them; one of another kind stays an attribute like any other.
  void take_notes(std::vector<std::string>& notes) {
    const auto one = attributes_.single.find("notes");
    if (one != attributes_.single.end() && std::holds_alternative<std::string>(one->second)) {
      notes = {std::get<std::string>(one->second)};
      attributes_.single.erase(one);
    }
    const auto many = attributes_.arrays.find("notes");
    if (many == attributes_.arrays.end()) return;
    if (auto* texts = std::get_if<std::vector<std::string>>(&many->second.values)) {
      notes = std::move(*texts);
      attributes_.arrays.erase(many);
    }
  }

  void read_attributes(Problem& problem, Result& recorded) {
    attributes_ = hdf5::read_attributes(group_.get(), where_);
    take_integer("schema_version", 1, 1, 1, "1, the only version this program reads");
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    problem.softmax_scale = take_number("softmax_scale", std::nullopt);
    problem.causal = take_flag("causal", false);
    problem.window_left =
        static_cast<int>(take_integer("window_left", -1, -1, kMost, "-1 (no limit) or more"));
    problem.window_right =
        static_cast<int>(take_integer("window_right", -1, -1, kMost, "-1 (no limit) or more"));
    problem.softcap = take_number("softcap", 0.0);
    problem.deterministic = take_flag("deterministic", true);
    problem.causal_alignment = take_choice("causal_alignment", {"bottom-right", "top-left"}, 0) == 0
                                   ? CausalAlignment::bottom_right
                                   : CausalAlignment::top_left;
    constexpr std::size_t kByRank = 2;
    layout_ = take_choice("layout", {"BSHD", "THD"}, kByRank);
    recorded.dq_order_fixed = take_flag("dq_order_fixed", true);
    recorded.dkv_order_fixed = take_flag("dkv_order_fixed", true);
    take_notes(recorded.notes);
    problem.attributes = std::move(attributes_.single);
    problem.array_attributes = std::move(attributes_.arrays);
  }

  // --- datasets, without their data

  enum class Kind : std::uint8_t { bf16, fp32, fp64, integer };

  static bool is_of(Kind kind, hid_t type) {
    switch (kind) {
      case Kind::bf16:
        return hdf5::is_bf16_type(type);
      case Kind::fp32:
        return H5Tequal(type, H5T_IEEE_F32LE) > 0;
      case Kind::fp64:
        return H5Tequal(type, H5T_IEEE_F64LE) > 0;
      case Kind::integer:
        return H5Tget_class(type) == H5T_INTEGER;
    }
    return false;
  }
  static const char* expected_type(Kind kind) {
    switch (kind) {
      case Kind::bf16:
        return "BF16 (2-byte little-endian float: sign bit 15, exponent 8 bits at 7 with bias 127, mantissa "
               "7 bits "
               "at 0, implied leading bit)";
      case Kind::fp32:
        return "float32 (little-endian)";
      case Kind::fp64:
        return "float64 (little-endian)";
      case Kind::integer:
        return "an integer type";
    }
    return "";
  }
  static std::size_t bytes_of(Kind kind) {
    switch (kind) {
      case Kind::bf16:
        return 2;
      case Kind::fp32:
        return 4;
      default:
        return 8;
    }
  }

  /// Opens a dataset of the group if it is there, checks its type, and counts its bytes.
  Dataset open(const std::string& name, Kind kind) {
    Dataset dataset;
    dataset.name = name;
    const std::size_t slash = name.find('/');
    if (slash != std::string::npos && !holds(group_.get(), name.substr(0, slash).c_str())) return dataset;
    if (!holds(group_.get(), name.c_str())) return dataset;
    announce(0);
    dataset.id = Handle(H5Dopen2(group_.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
    if (!dataset.id) fail("tensor " + name + " cannot be opened as a dataset" + last_error());
    const Handle type(H5Dget_type(dataset.id.get()), H5Tclose);
    if (!type) fail("tensor " + name + " has no readable type" + last_error());
    if (!is_of(kind, type.get())) {
      fail("tensor " + name + " has type " + hdf5::describe_type(type.get()) + ", expected " +
           expected_type(kind));
    }
    const Handle space(H5Dget_space(dataset.id.get()), H5Sclose);
    if (!space || !hdf5::read_shape(space.get(), dataset.shape)) {
      fail("tensor " + name + " has no readable shape" + last_error());
    }
    count_bytes(dataset, bytes_of(kind));
    return dataset;
  }

  void count_bytes(const Dataset& dataset, std::size_t element) {
    const std::size_t bytes = checked_elements(dataset.shape, where_ + ": tensor " + dataset.name) * element;
    const Handle list(H5Dget_create_plist(dataset.id.get()), H5Pclose);
    if (H5Pget_external_count(list.get()) > 0 || maps_another_file(list.get()))
      fail("tensor " + dataset.name + " keeps its data in another file");
    std::size_t chunk = 0;
    if (H5Pget_layout(list.get()) == H5D_CHUNKED) {
      std::vector<hsize_t> dims(dataset.shape.size());
      if (H5Pget_chunk(list.get(), static_cast<int>(dims.size()), dims.data()) ==
          static_cast<int>(dims.size())) {
        chunk = checked_elements({dims.begin(), dims.end()}, where_ + ": chunk of tensor " + dataset.name) *
                element;
      }
    }
    // Saturates rather than wraps; the library takes memory for a whole chunk, which may be larger than the
    // tensor.
    for (const std::size_t part : {bytes, chunk > bytes ? chunk : std::size_t{0}}) {
      total_bytes_ = part > std::numeric_limits<std::size_t>::max() - total_bytes_
                         ? std::numeric_limits<std::size_t>::max()
                         : total_bytes_ + part;
    }
  }

  void refuse_larger_than(std::size_t largest_bytes) const {
    if (total_bytes_ < largest_bytes) return;
    fail("the tensors' shapes ask for " + std::to_string(total_bytes_ >> 20U) +
         " MiB of memory, expected less than this machine's " + std::to_string(largest_bytes >> 20U) +
         " MiB");
  }

  void expect_shape(const Dataset& dataset, const std::vector<std::size_t>& expected) const {
    if (dataset.id && dataset.shape != expected) {
      fail("tensor " + dataset.name + " has shape " + shape_text(dataset.shape) + ", expected " +
           shape_text(expected));
    }
  }

  void open_inputs(Problem& problem) {
    q_ = open("q", Kind::bf16);
    k_ = open("k", Kind::bf16);
    v_ = open("v", Kind::bf16);
    dout_ = open("dout", Kind::bf16);
    const std::size_t rank = q_.shape.size();
    constexpr std::size_t kThd = 1;
    if (layout_ > kThd) layout_ = rank == 3 ? kThd : 0;
    problem.layout = layout_ == kThd ? Layout::thd : Layout::bshd;
    problem.q.shape = q_.shape;
    problem.k.shape = k_.shape;
    problem.v.shape = v_.shape;
    problem.dout.shape = dout_.shape;
    if (dout_.id && dout_.shape.empty()) fail("tensor dout has shape [], expected that of out");
    for (const Dataset* d : {&q_, &k_, &v_}) {
      const std::size_t expected = problem.layout == Layout::thd ? 3 : 4;
      if (d->shape.size() != expected) {
        fail("tensor " + d->name + " has shape " + shape_text(d->shape) + ", expected " +
             std::to_string(expected) + " axes, " +
             (problem.layout == Layout::thd ? "[tokens, heads, head size]"
                                            : "[batch, length, heads, head size]"));
      }
    }
    if (problem.layout == Layout::thd) {
      problem.cu_seqlens_q = read_offsets("cu_seqlens_q");
      problem.cu_seqlens_k = read_offsets("cu_seqlens_k");
    } else {
      for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) {
        if (holds(group_.get(), name))
          fail(std::string("tensor ") + name + " found, expected with layout THD only");
      }
    }
    set_sizes(problem);
  }

  std::vector<std::int32_t> read_offsets(const char* name) {
    const Dataset dataset = open(name, Kind::integer);
    if (!dataset.id) fail(std::string("tensor ") + name + " is missing, expected for layout THD");
    if (dataset.shape.size() != 1) {
      fail(std::string("tensor ") + name + " has shape " + shape_text(dataset.shape) + ", expected one axis");
    }
    // More sequences than this were never seen, and the check must not itself take much memory.
    constexpr std::size_t kMostOffsets = std::size_t{1} << 24U;
    if (dataset.shape[0] > kMostOffsets) {
      fail(std::string("tensor ") + name + " has " + std::to_string(dataset.shape[0]) +
           " entries, expected at most " + std::to_string(kMostOffsets));
    }
    std::vector<std::int64_t> wide(dataset.shape[0]);
    read_into(dataset, H5T_NATIVE_INT64, wide.data(), wide.size() * sizeof(std::int64_t));
    std::vector<std::int32_t> offsets;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      if (wide[i] < 0 || wide[i] > std::numeric_limits<std::int32_t>::max()) {
        fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(wide[i]) +
             ", expected 0 to 2147483647");
      }
      offsets.push_back(static_cast<std::int32_t>(wide[i]));
    }
    return offsets;
  }

  void open_outputs(const Capture& capture) {
    const Problem& problem = capture.problem;
    out_ = open("out", Kind::bf16);
    dq_ = open("dq", Kind::bf16);
    dk_ = open("dk", Kind::bf16);
    dv_ = open("dv", Kind::bf16);
    lse_ = open("lse", Kind::fp32);
    expect_shape(out_, problem.out_shape());
    expect_shape(dq_, problem.q_shape());
    expect_shape(dk_, problem.k_shape());
    expect_shape(dv_, problem.v_shape());
    for (const Dataset* d : {&dq_, &dk_, &dv_}) {
      if (d->id && !dout_.id) fail("tensor dout is missing, expected beside the recorded " + d->name);
    }
    expect_rows(lse_, problem.row_shape());
    dpsum_ = open("dpsum", Kind::fp32);
    lse_log2_ = open("lse_log2", Kind::fp32);
    dq_accum_ = open("dq_accum", Kind::fp32);
    dk_accum_ = open("dk_accum", Kind::fp32);
    dv_accum_ = open("dv_accum", Kind::fp32);
    expect_padded(dpsum_, problem.row_shape(), 0);
    expect_padded(lse_log2_, problem.row_shape(), 0);
    // The kernels' accumulators are as wide as the larger head dim, rounded up.
    const std::size_t widest = std::max(problem.head_dim, problem.head_dim_v);
    expect_padded(dq_accum_, problem.row_shape(), widest);
    std::vector<std::size_t> key_rows{problem.batch, problem.heads_kv, problem.seqlen_k};
    if (problem.layout == Layout::thd) key_rows = {problem.heads_kv, problem.total_k()};
    expect_padded(dk_accum_, key_rows, widest);
    expect_padded(dv_accum_, key_rows, widest);
    open_uncast(problem);
  }

  void open_uncast(const Problem& problem) {
    uncast_out_ = open("uncast/out", Kind::fp64);
    uncast_lse_ = open("uncast/lse", Kind::fp64);
    uncast_dq_ = open("uncast/dq", Kind::fp64);
    uncast_dk_ = open("uncast/dk", Kind::fp64);
    uncast_dv_ = open("uncast/dv", Kind::fp64);
    expect_shape(uncast_out_, problem.out_shape());
    expect_shape(uncast_lse_, problem.row_shape());
    expect_shape(uncast_dq_, problem.q_shape());
    expect_shape(uncast_dk_, problem.k_shape());
    expect_shape(uncast_dv_, problem.v_shape());
  }

  /// `rows`, where some libraries add a trailing axis of 1 and padding rows at the end of the last row axis.
  void expect_rows(Dataset& dataset, const std::vector<std::size_t>& rows) const {
    if (!dataset.id) return;
    std::vector<std::size_t> shape = dataset.shape;
    if (shape.size() == rows.size() + 1 && shape.back() == 1) shape.pop_back();
    if (shape.size() != rows.size() || !std::equal(rows.begin(), rows.end() - 1, shape.begin()) ||
        shape.back() < rows.back()) {
      fail("tensor " + dataset.name + " has shape " + shape_text(dataset.shape) + ", expected " +
           shape_text(rows) + ", or more rows as padding");
    }
    dataset.shape = shape;
  }

  /// `rows` with the last axis padded, and, where dim is not 0, one more axis of dim rounded up.
  void expect_padded(const Dataset& dataset, const std::vector<std::size_t>& rows, std::size_t dim) const {
    if (!dataset.id) return;
    std::vector<std::size_t> expected = rows;
    if (dim != 0) {
      std::size_t rounded = 256;
      for (const std::size_t size : {192, 128, 96, 64}) rounded = dim <= size ? size : rounded;
      expected.push_back(rounded);
    }
    std::vector<std::size_t> shape = dataset.shape;
    const std::size_t axis = rows.size() - 1;
    if (shape.size() == expected.size() && shape[axis] >= expected[axis]) expected[axis] = shape[axis];
    if (shape != expected) {
      fail("tensor " + dataset.name + " has shape " + shape_text(dataset.shape) + ", expected " +
           shape_text(expected) + ", or more rows as padding");
    }
  }

  // --- data

  void read_into(const Dataset& dataset, hid_t memory_type, void* data, std::size_t bytes) const {
    announce(bytes);
    if (bytes == 0) return;
    if (H5Dread(dataset.id.get(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0) {
      fail("data of tensor " + dataset.name + " cannot be read" + last_error());
    }
  }

  template <class T>
  Tensor<T> read_tensor(const Dataset& dataset) const {
    if (!dataset.id) return {};
    Tensor<T> tensor(dataset.shape);
    // The file's own type as memory type: no conversion, so every bit survives.
    const Handle type(H5Dget_type(dataset.id.get()), H5Tclose);
    read_into(dataset, type.get(), tensor.data.data(), tensor.data.size() * sizeof(T));
    return tensor;
  }

  /// A per-row tensor cut to `rows`.
  static Fp32Tensor without_padding(const Fp32Tensor& padded, const std::vector<std::size_t>& rows) {
    if (padded.empty() || padded.shape == rows) return padded;
    Fp32Tensor cut(rows);
    const std::size_t from = padded.shape.back();
    const std::size_t to = rows.back();
    for (std::size_t r = 0; to > 0 && r < cut.data.size() / to; ++r) {
      std::copy_n(padded.data.begin() + static_cast<std::ptrdiff_t>(r * from), to,
                  cut.data.begin() + static_cast<std::ptrdiff_t>(r * to));
    }
    return cut;
  }

  void read_data(Capture& capture) const {
    Problem& problem = capture.problem;
    problem.q = read_tensor<std::uint16_t>(q_);
    problem.k = read_tensor<std::uint16_t>(k_);
    problem.v = read_tensor<std::uint16_t>(v_);
    problem.dout = read_tensor<std::uint16_t>(dout_);
    Result& recorded = capture.recorded;
    recorded.out = read_tensor<std::uint16_t>(out_);
    recorded.lse = without_padding(read_tensor<float>(lse_), problem.row_shape());
    recorded.dq = read_tensor<std::uint16_t>(dq_);
    recorded.dk = read_tensor<std::uint16_t>(dk_);
    recorded.dv = read_tensor<std::uint16_t>(dv_);
    recorded.intermediates.dpsum = read_tensor<float>(dpsum_);
    recorded.intermediates.lse_log2 = read_tensor<float>(lse_log2_);
    recorded.intermediates.dq_accum = read_tensor<float>(dq_accum_);
    recorded.intermediates.dk_accum = read_tensor<float>(dk_accum_);
    recorded.intermediates.dv_accum = read_tensor<float>(dv_accum_);
    recorded.uncast.out = read_tensor<double>(uncast_out_);
    recorded.uncast.lse = read_tensor<double>(uncast_lse_);
    recorded.uncast.dq = read_tensor<double>(uncast_dq_);
    recorded.uncast.dk = read_tensor<double>(uncast_dk_);
    recorded.uncast.dv = read_tensor<double>(uncast_dv_);
  }

  std::string where_;
  const BeforeRead& before_read_;
  Handle file_, group_;
  hdf5::GroupAttributes attributes_;
  std::size_t layout_ = 0;
  std::size_t total_bytes_ = 0;
  Dataset q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
  Dataset dpsum_, lse_log2_, dq_accum_, dk_accum_, dv_accum_;
  Dataset uncast_out_, uncast_lse_, uncast_dq_, uncast_dk_, uncast_dv_;
};

}  // namespace

std::string full_name(const std::string& path, const std::string& group) {
  return group.empty() || group == "/" ? path : path + ":" + group;
}

std::size_t machine_memory() {
  std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    std::array<char, 32> text{};
    const ssize_t n = ::read(fd, text.data(), text.size() - 1);
    ::close(fd);
    const std::size_t limit =
        n > 0 ? std::strtoull(text.data(), nullptr, 10) : 0;  // "max" reads as 0: no limit
    if (limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

std::vector<std::string> capture_groups(const std::string& path, const BeforeRead& before_read) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const Handle file = open_file(path);
  Groups groups{{}, before_read};
  if (H5Ovisit2(file.get(), H5_INDEX_NAME, H5_ITER_INC, take_group, &groups, H5O_INFO_BASIC) < 0) {
    throw InputError(path + ": groups cannot be listed" + last_error());
  }
  std::vector<std::string> captures;
  for (const std::string& name : groups.names) {
    const Handle group(H5Gopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group) throw InputError(full_name(path, name) + ": group cannot be opened" + last_error());
    const Held held = held_inputs(group.get());
    if (held.count == 3) captures.push_back(name);
    if (belongs_to_a_result(name)) continue;
    // Two of three is a broken capture and not something else, so it must not be passed over in silence.
    if (held.count == 2) throw InputError(incomplete(path, name, held));
  }
  if (captures.empty()) throw InputError(path + ": no capture: no group holds q, k and v");
  return captures;
}

void expect_capture_group(const std::string& path, const std::string& group) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const Handle file = open_file(path);
  const Handle opened(H5Gopen2(file.get(), group.c_str(), H5P_DEFAULT), H5Gclose);
  if (!opened) throw InputError(full_name(path, group) + ": no such group in the file");
  const Held held = held_inputs(opened.get());
  if (held.count != 3) throw InputError(incomplete(path, group, held));
}

std::map<std::string, Attributes> capture_attributes(const std::string& path,
                                                     const std::vector<std::string>& groups,
                                                     const BeforeRead& before_read) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const Handle file = open_file(path);
  std::map<std::string, Attributes> attributes;
  for (const std::string& name : groups) {
    if (before_read) before_read(0);
    const Handle group(H5Gopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group) throw InputError(full_name(path, name) + ": group cannot be opened" + last_error());
    attributes[name] = hdf5::read_attributes(group.get(), full_name(path, name)).single;
  }
  return attributes;
}

Capture read_capture_group(const std::string& path, const std::string& group, std::size_t largest_bytes,
                           const BeforeRead& before_read) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  try {
    return GroupReader(path, group.empty() ? "/" : group, before_read).read(largest_bytes);
  } catch (const std::bad_alloc&) {
    throw InputError(full_name(path, group) + ": reading takes more memory than there is");
  }
}

}  // namespace bitattn
