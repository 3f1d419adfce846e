// Captures and findings written to a new HDF5 file: chunked, shuffled, deflated, with Fletcher-32, no time
// stamps, so that the same content is the same file.

#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <bit>
#include <cstring>
#include <map>

#include "datasets/capture_file.hpp"
#include "datasets/descriptor_driver.hpp"
#include "datasets/error.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/output_file.hpp"
#include "datasets/packed_chunk.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

// After hdf5.h, on which it depends.
#include <hdf5_hl.h>

namespace bitattn {
namespace {

using hdf5::Handle;

static_assert(std::endian::native == std::endian::little, "words are written as they stand in memory");

// A chunk is what a reader must unpack for one element, and what the checksum covers.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20U;
// Of what the library itself packs. Shuffled BF16 gains nothing from higher levels.
constexpr unsigned kDeflateLevel = 4;
// How much is packed at a time, between two looks at the interrupt flag.
constexpr std::size_t kBatchBytes = std::size_t{64} << 20U;

std::string joined(const std::string& group, const std::string& path) {
  const std::string head = group.empty() || group == "/" ? "" : group;
  return (head.empty() || head.front() == '/' ? head : "/" + head) + "/" + path;
}

std::vector<hsize_t> to_hsize(const std::vector<std::size_t>& shape) {
  return {shape.begin(), shape.end()};
}

/// Halves the leading axes until a chunk is small enough.
std::vector<hsize_t> chunk_shape(const std::vector<std::size_t>& shape, std::size_t element) {
  std::vector<hsize_t> chunk = to_hsize(shape);
  const auto bytes = [&] {
    hsize_t n = element;
    for (const hsize_t d : chunk) n *= d;
    return n;
  };
  for (hsize_t& d : chunk) {
    while (d > 1 && bytes() > kChunkBytes) d = (d + 1) / 2;
  }
  return chunk;
}

/// Attributes stay in the object's header: HDF5 1.10.8 crashes when it copies a group (h5copy, h5py's copy)
/// whose attributes, more than eight, lie elsewhere. One too large for a header still goes elsewhere by
/// itself.
void keep_attributes_compact(hid_t create) {
  H5Pset_attr_phase_change(create, 1024, 0);
}

}  // namespace

struct CaptureWriter::State {
  explicit State(const std::string& path, const std::vector<std::string>& inputs) : output(path, inputs) {
    const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG);
    // 1.8's format: checksums over metadata, attributes of any size, and still read by every HDF5 in use.
    H5Pset_libver_bounds(access.get(), H5F_LIBVER_V18, H5F_LIBVER_LATEST);
    const Handle create(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
    H5Pset_obj_track_times(create.get(), 0);
    keep_attributes_compact(create.get());
    sink.descriptor = output.descriptor();
    if (!hdf5::use_descriptor(access.get(), &sink)) fail("HDF5 file driver");
    file = Handle(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, create.get(), access.get()), H5Fclose);
    if (!file) fail("HDF5 file");
    make_parents = Handle(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
    H5Pset_create_intermediate_group(make_parents.get(), 1);
    H5Pset_char_encoding(make_parents.get(), H5T_CSET_UTF8);
    bf16 = hdf5::make_bf16_type();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Without commit, what the library still wants to write goes nowhere: the disk may be full.
  ~State() {
    sink.discard = true;
    streams.clear();
    file.close();
  }

  [[noreturn]] void fail(const std::string& what) const {
    const std::string reason =
        sink.error != 0 ? " (" + std::string(std::strerror(sink.error)) + ")" : hdf5::last_error();
    throw InputError(output.path() + ": cannot be written: " + what + reason);
  }

  Handle open_or_create_group(const std::string& name) {
    if (name.empty() || name == "/") return Handle(H5Gopen2(file.get(), "/", H5P_DEFAULT), H5Gclose);
    const std::string path = name.front() == '/' ? name : "/" + name;
    create_parents(path);
    if (H5Lexists(file.get(), path.c_str(), H5P_DEFAULT) > 0) {
      return Handle(H5Gopen2(file.get(), path.c_str(), H5P_DEFAULT), H5Gclose);
    }
    return create_group(path);
  }

  Handle create_group(const std::string& path) {
    const Handle create(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
    H5Pset_obj_track_times(create.get(), 0);
    keep_attributes_compact(create.get());
    Handle group(H5Gcreate2(file.get(), path.c_str(), make_parents.get(), create.get(), H5P_DEFAULT),
                 H5Gclose);
    if (!group) fail("group " + path);
    return group;
  }

  // Made one by one: groups that HDF5 makes on the way would carry time stamps.
  void create_parents(const std::string& path) {
    for (std::size_t slash = path.find('/', 1); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      const std::string parent = path.substr(0, slash);
      if (H5Lexists(file.get(), parent.c_str(), H5P_DEFAULT) <= 0) create_group(parent);
    }
  }

  Handle create_dataset(const std::string& path, hid_t type, const std::vector<std::size_t>& shape,
                        const void* fill) {
    create_parents(path);
    const std::vector<hsize_t> dims = to_hsize(shape);
    const Handle space(shape.empty() ? H5Screate(H5S_SCALAR)
                                     : H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                       H5Sclose);
    const Handle create(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(create.get(), 0);
    if (fill != nullptr) H5Pset_fill_value(create.get(), type, fill);
    if (checked_elements(shape, path) > 0 && !shape.empty()) {
      const std::vector<hsize_t> chunk = chunk_shape(shape, H5Tget_size(type));
      H5Pset_chunk(create.get(), static_cast<int>(chunk.size()), chunk.data());
      H5Pset_shuffle(create.get());
      H5Pset_deflate(create.get(), kDeflateLevel);
      H5Pset_fletcher32(create.get());
    }
    const Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
    // Room for the chunks that a row of pieces touches, so that each is packed once.
    constexpr std::size_t kCacheSlots = 12421;
    constexpr std::size_t kCacheBytes = std::size_t{32} << 20U;
    H5Pset_chunk_cache(access.get(), kCacheSlots, kCacheBytes, 1.0);
    Handle dataset(H5Dcreate2(file.get(), path.c_str(), type, space.get(), make_parents.get(), create.get(),
                              access.get()),
                   H5Dclose);
    if (!dataset) fail("tensor " + path);
    return dataset;
  }

  void write_block(const std::string& path, const Handle& dataset, hid_t type,
                   const std::vector<std::size_t>& start, const std::vector<std::size_t>& count,
                   const void* data) const {
    const Handle space(H5Dget_space(dataset.get()), H5Sclose);
    const std::vector<hsize_t> from = to_hsize(start);
    const std::vector<hsize_t> size = to_hsize(count);
    const Handle memory(H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr), H5Sclose);
    if (H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, from.data(), nullptr, size.data(), nullptr) < 0 ||
        H5Dwrite(dataset.get(), type, memory.get(), space.get(), H5P_DEFAULT, data) < 0 || sink.error != 0) {
      fail("tensor " + path);
    }
  }

  /// A whole tensor. Its chunks are packed here, on all cores, and handed to the library as they are to be
  /// stored.
  Handle write_dataset(const std::string& path, hid_t type, const std::vector<std::size_t>& shape,
                       const void* data, std::size_t elements) {
    if (shape.empty() || checked_elements(shape, path) != elements) {
      throw InputError(output.path() + ": tensor " + path + " has shape " + shape_text(shape) +
                       " but holds " + std::to_string(elements) + " values");
    }
    Handle dataset = create_dataset(path, type, shape, nullptr);
    if (elements == 0) return dataset;
    const std::size_t element = H5Tget_size(type);
    const std::vector<hsize_t> chunk = chunk_shape(shape, element);
    const ChunkGrid grid{shape, {chunk.begin(), chunk.end()}, element};
    const std::size_t batch = std::max<std::size_t>(1, kBatchBytes / grid.chunk_bytes());
    for (std::size_t first = 0; first < grid.chunks(); first += batch) {
      throw_if_interrupted();
      write_chunks(path, dataset, grid, data, first, std::min(batch, grid.chunks() - first));
    }
    return dataset;
  }

  void write_chunks(const std::string& path, const Handle& dataset, const ChunkGrid& grid, const void* data,
                    std::size_t first, std::size_t count) {
    std::vector<std::vector<unsigned char>> packed(count);
    // Isolated: a thread that waits here holds the library's lock and must not pick up somebody else's work,
    // which may want it too.
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(std::size_t{0}, count,
                        [&](std::size_t i) { packed[i] = packers.local().pack(grid, data, first + i); });
    });
    constexpr std::uint32_t kNoFilterLeftOut = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::vector<hsize_t> at = to_hsize(grid.origin(first + i));
      if (H5Dwrite_chunk(dataset.get(), H5P_DEFAULT, kNoFilterLeftOut, at.data(), packed[i].size(),
                         packed[i].data()) < 0 ||
          sink.error != 0) {
        fail("tensor " + path);
      }
    }
  }

  template <class T>
  void write_tensor(const std::string& group, const std::string& name, hid_t type, const Tensor<T>& tensor) {
    if (!tensor.empty())
      write_dataset(joined(group, name), type, tensor.shape, tensor.data.data(), tensor.data.size());
  }

  // --- attributes

  void put(hid_t object, const std::string& name, hid_t type, hid_t space, const void* value) const {
    const Handle create(H5Pcreate(H5P_ATTRIBUTE_CREATE), H5Pclose);
    H5Pset_char_encoding(create.get(), H5T_CSET_UTF8);
    if (H5Aexists(object, name.c_str()) > 0) H5Adelete(object, name.c_str());
    const Handle attribute(H5Acreate2(object, name.c_str(), type, space, create.get(), H5P_DEFAULT),
                           H5Aclose);
    if (!attribute || H5Awrite(attribute.get(), type, value) < 0) fail("attribute " + printable(name));
  }

  void put_texts(hid_t object, const std::string& name, hid_t space,
                 const std::vector<std::string>& texts) const {
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_cset(type.get(), H5T_CSET_UTF8);
    H5Tset_size(type.get(), H5T_VARIABLE);
    std::vector<const char*> pointers;
    pointers.reserve(texts.size());
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    put(object, name, type.get(), space, pointers.data());
  }

  void put(hid_t object, const std::string& name, const Attribute& value) const {
    const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    if (const auto* number = std::get_if<std::int64_t>(&value)) {
      put(object, name, H5T_STD_I64LE, space.get(), number);
    } else if (const auto* real = std::get_if<double>(&value)) {
      put(object, name, H5T_IEEE_F64LE, space.get(), real);
    } else {
      put_texts(object, name, space.get(), {std::get<std::string>(value)});
    }
  }

  void put(hid_t object, const std::string& name, const AttributeArray& array) const {
    const std::vector<hsize_t> dims = to_hsize(array.shape);
    const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
    if (const auto* numbers = std::get_if<std::vector<std::int64_t>>(&array.values)) {
      put(object, name, H5T_STD_I64LE, space.get(), numbers->data());
    } else if (const auto* reals = std::get_if<std::vector<double>>(&array.values)) {
      put(object, name, H5T_IEEE_F64LE, space.get(), reals->data());
    } else {
      put_texts(object, name, space.get(), std::get<std::vector<std::string>>(array.values));
    }
  }

  // --- findings

  /// The dimension scale 0, 1, … of an axis: <findings>/<axis>, or <axis>_<length> where that name has
  /// another use.
  Handle axis_scale(const std::string& findings, const std::string& axis, std::size_t length) {
    for (const std::string& name : {axis, axis + "_" + std::to_string(length)}) {
      const std::string path = joined(findings, name);
      if (H5Lexists(file.get(), path.c_str(), H5P_DEFAULT) <= 0) {
        std::vector<std::int64_t> index(length);
        for (std::size_t i = 0; i < length; ++i) index[i] = static_cast<std::int64_t>(i);
        Handle scale = write_dataset(path, H5T_STD_I64LE, {length}, index.data(), length);
        if (H5DSset_scale(scale.get(), axis.c_str()) < 0) fail("dimension scale " + path);
        return scale;
      }
      Handle scale(H5Dopen2(file.get(), path.c_str(), H5P_DEFAULT), H5Dclose);
      if (!scale || H5DSis_scale(scale.get()) <= 0) continue;
      const Handle space(H5Dget_space(scale.get()), H5Sclose);
      if (H5Sget_simple_extent_npoints(space.get()) == static_cast<hssize_t>(length)) return scale;
    }
    throw InputError(output.path() + ": no free name for axis " + axis + " of length " +
                     std::to_string(length) + " in " + findings);
  }

  template <class T>
  void write_finding(const std::string& group, const std::string& path, hid_t type, const Tensor<T>& values,
                     const std::string& units, const std::string& description,
                     const std::vector<std::string>& axes) {
    const std::string findings = joined(group, "findings");
    const std::string full = findings + "/" + path;
    if (values.empty()) throw InputError(output.path() + ": finding " + full + " has no shape");
    const Handle dataset = write_dataset(full, type, values.shape, values.data.data(), values.data.size());
    put(dataset.get(), "units", units);
    put(dataset.get(), "description", description);
    for (std::size_t i = 0; i < axes.size() && i < values.shape.size(); ++i) {
      if (axes[i].empty()) continue;
      const Handle scale = axis_scale(findings, axes[i], values.shape[i]);
      if (H5DSattach_scale(dataset.get(), scale.get(), static_cast<unsigned>(i)) < 0 ||
          H5DSset_label(dataset.get(), static_cast<unsigned>(i), axes[i].c_str()) < 0) {
        fail("axis " + axes[i] + " of " + full);
      }
    }
  }

  OutputFile output;
  hdf5::DescriptorSink sink;
  Handle file, make_parents, bf16;
  std::map<std::string, Handle> streams;
  tbb::enumerable_thread_specific<ChunkPacker> packers;
};

namespace {

const char* layout_text(Layout layout) {
  return layout == Layout::bshd ? "BSHD" : "THD";
}

/// Everything a capture's group says, the named fields last so that no attribute of the same name can
/// displace them.
Attributes capture_attributes(const Problem& problem, const Result& result) {
  Attributes all = problem.attributes;
  if (!result.backend.empty() && result.backend != "recorded") all["backend"] = result.backend;
  all["schema_version"] = std::int64_t{1};
  all["layout"] = layout_text(problem.layout);
  all["softmax_scale"] = problem.softmax_scale;
  all["causal"] = std::int64_t{problem.causal ? 1 : 0};
  all["causal_alignment"] =
      problem.causal_alignment == CausalAlignment::bottom_right ? "bottom-right" : "top-left";
  all["window_left"] = std::int64_t{problem.window_left};
  all["window_right"] = std::int64_t{problem.window_right};
  all["softcap"] = problem.softcap;
  all["deterministic"] = std::int64_t{problem.deterministic ? 1 : 0};
  if (!result.dq_order_fixed) all["dq_order_fixed"] = std::int64_t{0};
  if (!result.dkv_order_fixed) all["dkv_order_fixed"] = std::int64_t{0};
  return all;
}

}  // namespace

CaptureWriter::CaptureWriter(const std::string& path, const std::vector<std::string>& inputs) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  state_ = std::make_unique<State>(path, inputs);
}

CaptureWriter::~CaptureWriter() {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  state_.reset();
}

void CaptureWriter::write_capture(const std::string& group, const Problem& problem, const Result& result) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  State& s = *state_;
  const std::string where = s.output.path() + ":" + (group.empty() ? "/" : group);
  check_problem(problem, where);
  check_result(problem, result, where);
  const Handle opened = s.open_or_create_group(group);
  if (!opened) s.fail("group " + group);
  for (const auto& [name, value] : capture_attributes(problem, result)) s.put(opened.get(), name, value);
  for (const auto& [name, array] : problem.array_attributes) s.put(opened.get(), name, array);
  if (!result.notes.empty()) {
    s.put(opened.get(), "notes", AttributeArray{{result.notes.size()}, result.notes});
  }
  const hid_t bf16 = s.bf16.get();
  s.write_tensor(group, "q", bf16, problem.q);
  s.write_tensor(group, "k", bf16, problem.k);
  s.write_tensor(group, "v", bf16, problem.v);
  s.write_tensor(group, "dout", bf16, problem.dout);
  if (problem.layout == Layout::thd) {
    for (const auto& [name, offsets] : {std::pair{"cu_seqlens_q", &problem.cu_seqlens_q},
                                        std::pair{"cu_seqlens_k", &problem.cu_seqlens_k}}) {
      s.write_dataset(joined(group, name), H5T_STD_I32LE, {offsets->size()}, offsets->data(),
                      offsets->size());
    }
  }
  s.write_tensor(group, "out", bf16, result.out);
  s.write_tensor(group, "lse", H5T_IEEE_F32LE, result.lse);
  s.write_tensor(group, "dq", bf16, result.dq);
  s.write_tensor(group, "dk", bf16, result.dk);
  s.write_tensor(group, "dv", bf16, result.dv);
  const Intermediates& between = result.intermediates;
  s.write_tensor(group, "dpsum", H5T_IEEE_F32LE, between.dpsum);
  s.write_tensor(group, "lse_log2", H5T_IEEE_F32LE, between.lse_log2);
  s.write_tensor(group, "dq_accum", H5T_IEEE_F32LE, between.dq_accum);
  s.write_tensor(group, "dk_accum", H5T_IEEE_F32LE, between.dk_accum);
  s.write_tensor(group, "dv_accum", H5T_IEEE_F32LE, between.dv_accum);
  s.write_tensor(group, "uncast/out", H5T_IEEE_F64LE, result.uncast.out);
  s.write_tensor(group, "uncast/lse", H5T_IEEE_F64LE, result.uncast.lse);
  s.write_tensor(group, "uncast/dq", H5T_IEEE_F64LE, result.uncast.dq);
  s.write_tensor(group, "uncast/dk", H5T_IEEE_F64LE, result.uncast.dk);
  s.write_tensor(group, "uncast/dv", H5T_IEEE_F64LE, result.uncast.dv);
}

void CaptureWriter::write_finding(const std::string& group, const std::string& path, const Fp64Tensor& values,
                                  const std::string& units, const std::string& description,
                                  const std::vector<std::string>& axes) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  state_->write_finding(group, path, H5T_IEEE_F64LE, values, units, description, axes);
}

void CaptureWriter::write_finding(const std::string& group, const std::string& path, const Fp32Tensor& values,
                                  const std::string& units, const std::string& description,
                                  const std::vector<std::string>& axes) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  state_->write_finding(group, path, H5T_IEEE_F32LE, values, units, description, axes);
}

void CaptureWriter::write_attributes(const std::string& group, const Attributes& attributes) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const Handle opened = state_->open_or_create_group(group);
  if (!opened) state_->fail("group " + group);
  for (const auto& [name, value] : attributes) state_->put(opened.get(), name, value);
}

void CaptureWriter::create_streamed_fp32(const std::string& group, const std::string& path,
                                         const std::vector<std::size_t>& shape, const std::string& units,
                                         const std::string& description) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const std::string full = joined(group, path);
  constexpr std::uint32_t kNeverWritten = 0xffffffffU;
  Handle dataset = state_->create_dataset(full, H5T_IEEE_F32LE, shape, &kNeverWritten);
  state_->put(dataset.get(), "units", units);
  state_->put(dataset.get(), "description", description);
  state_->streams[full] = std::move(dataset);
}

void CaptureWriter::write_streamed_fp32(const std::string& group, const std::string& path,
                                        const std::vector<std::size_t>& start,
                                        const std::vector<std::size_t>& count, const float* values) {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  const std::string full = joined(group, path);
  const auto found = state_->streams.find(full);
  if (found == state_->streams.end()) throw std::logic_error(full + " was not created as a streamed tensor");
  if (checked_elements(count, full) == 0) return;
  state_->write_block(full, found->second, H5T_IEEE_F32LE, start, count, values);
}

void CaptureWriter::commit() {
  const hdf5::LibraryLock lock;
  const hdf5::QuietErrors quiet;
  throw_if_interrupted();
  State& s = *state_;
  for (auto& [name, dataset] : s.streams) {
    if (!dataset.close()) s.fail("tensor " + name);
  }
  s.streams.clear();
  if (H5Fflush(s.file.get(), H5F_SCOPE_GLOBAL) < 0 || s.sink.error != 0) s.fail("flushing");
  if (!s.file.close() || s.sink.error != 0) s.fail("closing");
  s.output.commit();
}

}  // namespace bitattn
