// The compiled half of the Python package bitattn: captures from and to NumPy, and what the program does with
// them. Results are the dictionaries of the program's --json, made by the same code.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "audit/compare.hpp"
#include "audit/diagnose.hpp"
#include "audit/identify.hpp"
#include "audit/inputs.hpp"
#include "audit/witness.hpp"
#include "backends/backend.hpp"
#include "cli/capture_header.hpp"
#include "cli/capture_list.hpp"
#include "cli/comparison_report.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/identification_report.hpp"
#include "cli/witness_section.hpp"
#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/import.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/regime.hpp"
#include "datasets/shape_text.hpp"
#include "python/words.hpp"

namespace bitattn::python {

namespace py = pybind11;
using cli::Json;

namespace {

/// Text of a file may hold any bytes: what is no UTF-8 is replaced.
py::str text_to_python(const std::string& text) {
  PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace");
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(object);
}

py::object to_python(const Json& json) {
  switch (json.type()) {
    case Json::value_t::boolean:
      return py::bool_(json.get<bool>());
    case Json::value_t::number_integer:
      return py::int_(json.get<std::int64_t>());
    case Json::value_t::number_unsigned:
      return py::int_(json.get<std::uint64_t>());
    case Json::value_t::number_float:
      return py::float_(json.get<double>());
    case Json::value_t::string:
      return text_to_python(json.get<std::string>());
    case Json::value_t::array: {
      py::list list;
      for (const Json& item : json) list.append(to_python(item));
      return list;
    }
    case Json::value_t::object: {
      py::dict dict;
      for (const auto& [key, value] : json.items()) dict[text_to_python(key)] = to_python(value);
      return dict;
    }
    default:
      return py::none();
  }
}

/// Progress for long calls: Ctrl-C is noticed, and the caller's function called, on the thread that called us
/// only, at most every 50 ms.
class Watcher {
 public:
  explicit Watcher(py::object function)
      : function_(std::move(function)), caller_(std::this_thread::get_id()) {}

  void operator()(const std::string& stage, double share) {
    if (std::this_thread::get_id() != caller_) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(50)) return;
    last_ = now;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!function_.is_none()) function_(stage, share);
  }

 private:
  py::object function_;
  std::thread::id caller_;
  std::chrono::steady_clock::time_point last_;
};

// --- captures

std::vector<std::int32_t> offsets(const py::object& object, const std::string& name) {
  try {
    return object.attr("tolist")().cast<std::vector<std::int32_t>>();
  } catch (const py::cast_error&) {
    throw InputError(name + " is no list of 32-bit integers");
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_AttributeError)) throw;
  }
  try {
    return object.cast<std::vector<std::int32_t>>();
  } catch (const py::cast_error&) {
    throw InputError(name + " is no list of 32-bit integers");
  }
}

/// Text as HDF5 can hold it.
std::string plain_text(const py::handle& value, const std::string& what) {
  std::string text;
  try {
    text = value.cast<std::string>();
  } catch (const py::cast_error&) {
    throw InputError(what + " is no text that UTF-8 can hold");
  }
  if (text.find('\0') != std::string::npos) throw InputError(what + " holds a character NUL");
  return text;
}

Attribute attribute(const py::handle& value, const std::string& name) {
  if (py::isinstance<py::bool_>(value) || py::isinstance<py::int_>(value)) {
    try {
      return value.cast<std::int64_t>();
    } catch (const py::cast_error&) {
      throw InputError("attribute " + printable(name) + " is beyond 64 bits");
    }
  }
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return plain_text(value, "attribute " + printable(name));
  throw InputError("attribute " + printable(name) + " is no number and no text");
}

/// A dictionary of a capture's own attributes. What a problem holds itself cannot be among them.
Attributes attributes_from(const py::dict& dict) {
  Attributes attributes;
  for (const auto& [key, value] : dict) {
    const std::string name = plain_text(py::str(key), "the name of an attribute");
    if (is_problem_attribute(name)) throw InputError("attribute " + name + " is an argument of its own");
    attributes[name] = attribute(value, name);
  }
  return attributes;
}

void expect_shape(const std::string& name, const std::vector<std::size_t>& found,
                  const std::vector<std::size_t>& expected) {
  if (found.empty() || found == expected) return;
  throw InputError("tensor " + name + " has shape " + shape_text(found) + ", expected " +
                   shape_text(expected));
}

Bf16Tensor optional_bf16(const py::object& object, const std::string& name) {
  return object.is_none() ? Bf16Tensor{} : bf16_tensor(object, name);
}

std::shared_ptr<Capture> make_capture(const py::object& q, const py::object& k, const py::object& v,
                                      double softmax_scale, const py::object& dout, const py::object& out,
                                      const py::object& lse, const py::object& dq, const py::object& dk,
                                      const py::object& dv, bool causal, std::pair<int, int> window,
                                      double softcap, bool deterministic, const std::string& alignment,
                                      const py::object& cu_seqlens_q, const py::object& cu_seqlens_k,
                                      const py::dict& attributes, const std::string& name) {
  auto capture = std::make_shared<Capture>();
  capture->name = name;
  Problem& p = capture->problem;
  if (cu_seqlens_q.is_none() != cu_seqlens_k.is_none())
    throw InputError("cu_seqlens_q and cu_seqlens_k: one is given, expected both or neither");
  p.layout = cu_seqlens_q.is_none() ? Layout::bshd : Layout::thd;
  p.q = bf16_tensor(q, "q");
  p.k = bf16_tensor(k, "k");
  p.v = bf16_tensor(v, "v");
  p.dout = optional_bf16(dout, "dout");
  const std::size_t axes = p.layout == Layout::thd ? 3 : 4;
  for (const auto& [tensor_name, tensor] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}}) {
    if (tensor->shape.size() == axes) continue;
    throw InputError(std::string("tensor ") + tensor_name + " has shape " + shape_text(tensor->shape) +
                     ", expected " + (axes == 3 ? "[total,H,D]" : "[B,S,H,D]"));
  }
  if (p.layout == Layout::thd) {
    p.cu_seqlens_q = offsets(cu_seqlens_q, "cu_seqlens_q");
    p.cu_seqlens_k = offsets(cu_seqlens_k, "cu_seqlens_k");
  }
  set_sizes(p);
  p.softmax_scale = softmax_scale;
  p.causal = causal;
  p.window_left = window.first;
  p.window_right = window.second;
  p.softcap = softcap;
  p.deterministic = deterministic;
  if (alignment != "bottom-right" && alignment != "top-left")
    throw InputError("causal_alignment is \"" + alignment + "\", expected bottom-right or top-left");
  p.causal_alignment = alignment == "top-left" ? CausalAlignment::top_left : CausalAlignment::bottom_right;
  p.attributes = attributes_from(attributes);
  check_problem(p, name);
  Result& r = capture->recorded;
  r.backend = "recorded";
  r.out = optional_bf16(out, "out");
  r.dq = optional_bf16(dq, "dq");
  r.dk = optional_bf16(dk, "dk");
  r.dv = optional_bf16(dv, "dv");
  if (!lse.is_none()) r.lse = fp32_tensor(lse, "lse");
  expect_shape("out", r.out.shape, p.out_shape());
  expect_shape("lse", r.lse.shape, p.row_shape());
  expect_shape("dq", r.dq.shape, p.q_shape());
  expect_shape("dk", r.dk.shape, p.k_shape());
  expect_shape("dv", r.dv.shape, p.v_shape());
  if (p.dout.empty() && !(r.dq.empty() && r.dk.empty() && r.dv.empty()))
    throw InputError("tensor dout is missing, expected beside dq, dk, dv");
  return capture;
}

/// One BF16 tensor of a capture, as takers of DLPack want it.
struct Bf16View {
  py::object owner;
  const Bf16Tensor* tensor;
};

Bf16View view_of(const py::object& self, const std::string& name) {
  const auto& capture = self.cast<const Capture&>();
  const Problem& p = capture.problem;
  const Result& r = capture.recorded;
  for (const auto& [known, tensor] : {std::pair<const char*, const Bf16Tensor*>{"q", &p.q},
                                      {"k", &p.k},
                                      {"v", &p.v},
                                      {"dout", &p.dout},
                                      {"out", &r.out},
                                      {"dq", &r.dq},
                                      {"dk", &r.dk},
                                      {"dv", &r.dv}}) {
    if (name != known) continue;
    if (tensor->empty()) throw InputError(capture.name + ": tensor " + name + " was not recorded");
    return {self, tensor};
  }
  throw InputError("no tensor " + name + ", expected q, k, v, dout, out, dq, dk or dv");
}

py::dict attributes_of(const Problem& problem) {
  py::dict dict;
  for (const auto& [name, value] : problem.attributes) {
    const auto* text = std::get_if<std::string>(&value);
    dict[text_to_python(name)] =
        text != nullptr ? py::object(text_to_python(*text))
                        : std::visit([](const auto& v) { return py::object(py::cast(v)); }, value);
  }
  return dict;
}

std::vector<std::string> captures_in(const std::string& path) {
  std::vector<std::string> names;
  for (const std::string& file : cli::expand_folders({path}))
    for (const ListedCapture& listed : list_attributes(file)) names.push_back(listed.name);
  return names;
}

std::shared_ptr<Capture> load(const std::string& name) {
  if (!parse_capture_name(name).group.empty()) return std::make_shared<Capture>(read_capture(name));
  const std::vector<std::string> names = captures_in(name);
  if (names.size() != 1) {
    throw InputError(name + ": holds " + std::to_string(names.size()) +
                     " captures, expected the name of one, such as " + names.at(0) +
                     " (bitattn.list_captures)");
  }
  return std::make_shared<Capture>(read_capture(names[0]));
}

// HDF5 is not safe for threads, and h5py may be at work in this process: reading and writing keep the lock of
// the interpreter.
void save(const std::string& path, const std::map<std::string, std::shared_ptr<Capture>>& captures) {
  if (path.find('\0') != std::string::npos) throw InputError("the path holds a character NUL");
  CaptureWriter writer(path);
  for (const auto& [group, capture] : captures) {
    if (!capture) throw InputError("group " + printable(group) + " is None, expected a Capture");
    writer.write_capture(group, capture->problem, capture->recorded);
  }
  writer.commit();
}

/// What `bitattn import` writes; returns the groups.
std::vector<std::string> import_tensors(
    const std::vector<std::string>& files, const std::string& output,
    const std::map<std::string, std::string>& names, const std::string& layout, bool round,
    const std::optional<double>& softmax_scale, const std::optional<bool>& causal,
    const std::optional<std::pair<int, int>>& window, const std::optional<double>& softcap,
    const std::optional<std::string>& causal_alignment, const py::dict& attributes) {
  ImportOptions options{names, layout, round, softmax_scale, causal, {}, {}, softcap, causal_alignment, {}};
  if (window) {
    options.window_left = window->first;
    options.window_right = window->second;
  }
  options.attributes = attributes_from(attributes);
  const std::string where = files.size() == 1 ? files[0] : "the files";
  const std::vector<ImportedCapture> imported = import_captures(where, read_foreign(files), options);
  CaptureWriter writer(output, files);
  std::vector<std::string> groups;
  for (const ImportedCapture& import : imported) {
    writer.write_capture(import.group, import.capture.problem, import.capture.recorded);
    groups.push_back(import.group);
  }
  writer.commit();
  return groups;
}

// --- what the program does

Result compute(const Capture& capture, const std::string& backend, bool order_free, Watcher& watcher) {
  RunOptions options;
  options.want_order_free_parts = order_free;
  options.want_accumulators = !order_free;
  options.progress = [&watcher, &backend](double share) { watcher(backend, share); };
  return make_backend(backend)->run(capture, options);
}

audit::Comparison compare_backends(const Capture& capture, const std::string& a, const std::string& b,
                                   Watcher& watcher) {
  const Result first = compute(capture, a, true, watcher);
  const Result second = compute(capture, b, true, watcher);
  return audit::compare_results(capture.name, capture.problem, first, second);
}

py::object verify(const Capture& capture, const std::string& backend, const py::object& progress) {
  Watcher watcher(progress);
  Json json;
  {
    const py::gil_scoped_release free;
    const audit::Comparison comparison = compare_backends(capture, "recorded", backend, watcher);
    json = cli::comparison_json(comparison);
    json["verified"] = cli::verified(comparison);
  }
  return to_python(json);
}

py::object compare(const Capture& capture, const std::string& a, const std::string& b,
                   const py::object& progress) {
  Watcher watcher(progress);
  Json json;
  {
    const py::gil_scoped_release free;
    json = cli::comparison_json(compare_backends(capture, a, b, watcher));
  }
  return to_python(json);
}

py::object compare_recorded(const Capture& a, const Capture& b) {
  Json json;
  {
    const py::gil_scoped_release free;
    const auto fail = [&](const std::string& difference) {
      throw InputError(a.name + " and " + b.name + " are not the same problem: " + difference);
    };
    const std::string difference = audit::problem_difference(a.problem, b.problem);
    if (!difference.empty()) fail(difference);
    for (const audit::TensorComparison& t : audit::compare_inputs(a.problem, b.problem)) {
      if (t.verdict == audit::TensorVerdict::differs)
        fail(t.tensor + " differs in " + std::to_string(t.differing_bits) + " of " +
             std::to_string(t.elements) + " elements");
    }
    // Bits against bits: also of what a backend has just computed no order of adding is left open.
    Result first = a.recorded;
    Result second = b.recorded;
    first.backend = second.backend = "recorded";
    audit::Comparison comparison =
        audit::compare_results(a.name + " against " + b.name, a.problem, first, second);
    if (comparison.compared_tensors() == 0)
      throw InputError(a.name + " and " + b.name + ": no output is recorded in both");
    comparison.a = "a";
    comparison.b = "b";
    json = cli::comparison_json(comparison);
  }
  return to_python(json);
}

std::shared_ptr<Capture> run(const Capture& capture, const std::string& backend, const py::object& progress) {
  Watcher watcher(progress);
  const py::gil_scoped_release free;
  auto computed = std::make_shared<Capture>();
  computed->recorded = compute(capture, backend, false, watcher);
  computed->problem = capture.problem;
  computed->name = capture.name;
  return computed;
}

py::object diagnose(const Capture& capture, const std::string& backend,
                    const std::optional<std::string>& reference, const std::string& rows, std::size_t worst,
                    const std::string& blame, bool remedies, const py::object& progress) {
  const std::map<std::string, audit::BlameScope> scopes{{"none", audit::BlameScope::none},
                                                        {"worst", audit::BlameScope::worst},
                                                        {"all", audit::BlameScope::all}};
  const auto scope = scopes.find(blame);
  if (scope == scopes.end()) throw InputError("blame is \"" + blame + "\", expected none, worst or all");
  Watcher watcher(progress);
  Json json;
  {
    const py::gil_scoped_release free;
    audit::DiagnoseOptions options;
    options.backend = backend;
    options.reference = reference.value_or("");
    if (!rows.empty()) options.rows = audit::parse_rows(rows);
    options.worst_rows = std::min<std::size_t>(worst, 16);
    options.blame = scope->second;
    options.progress = [&watcher](const std::string& stage, double share) { watcher(stage, share); };
    audit::Diagnosis diagnosis = audit::diagnose(capture, options);
    diagnosis.remedies = audit::find_remedies(
        capture, diagnosis, remedies ? audit::TryRemedies::where_cheap : audit::TryRemedies::never,
        options.progress);
    json = cli::diagnosis_json(capture, diagnosis, worst);
  }
  return to_python(json);
}

py::object witness(const Capture& capture) {
  Json json;
  {
    const py::gil_scoped_release free;
    const audit::Witness found = audit::witness(capture);
    json = {{"capture", capture.name},
            {"kernel", capture.problem.text("kernel")},
            {"verdict", cli::witness_verdict(found)},
            {"broken", found.broken()}};
    json["laws"] = cli::witness_json(found);
  }
  return to_python(json);
}

py::object identify(const Capture& capture, bool remedies, const py::object& progress) {
  Watcher watcher(progress);
  Json json;
  {
    const py::gil_scoped_release free;
    audit::IdentifyOptions options;
    options.with_remedies = remedies;
    options.progress = [&watcher](const std::string& stage, double share) { watcher(stage, share); };
    json = cli::identification_json(audit::identify(capture, options));
  }
  return to_python(json);
}

py::object info(const Capture& capture) {
  Json json;
  {
    const py::gil_scoped_release free;
    json = cli::capture_json(capture, audit::summarize_inputs(capture.problem));
  }
  py::object found = to_python(json);
  found["attributes"] = attributes_of(capture.problem);
  return found;
}

/// pybind11 before 2.12 reads NumPy 1's memory layout: under NumPy 2 strides would be garbage, without an
/// error.
void expect_numpy_that_fits() {
#if PYBIND11_VERSION_HEX < 0x020C0000
  const auto version = py::module_::import("numpy").attr("__version__").cast<std::string>();
  if (std::stoi(version) >= 2) {
    throw py::import_error("this bitattn was built with pybind11 " PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(
                               PYBIND11_VERSION_MINOR) ", which cannot read arrays of NumPy " +
                           version + ": use the interpreter it was built for, or `pip install .`");
  }
#endif
}

std::shared_ptr<Capture> generated(const GenerateOptions& options) {
  const py::gil_scoped_release free;
  auto capture = std::make_shared<Capture>();
  capture->problem = generate(options);
  capture->name = options.regime;
  return capture;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  expect_numpy_that_fits();
  m.doc() = "The compiled half of bitattn: see help(bitattn).";
  m.attr("version") = BITATTN_VERSION;
  py::register_exception<InputError>(m, "InputError", PyExc_ValueError).doc() =
      "Bad input: one line that names the tensor or file, what was found and what was expected.";
  py::register_exception<Interrupted>(m, "Interrupted", PyExc_KeyboardInterrupt);

  py::class_<Bf16View>(m, "Bf16View",
                       "A BF16 tensor of a capture for torch.from_dlpack; not to be written to.")
      .def("__dlpack__",
           [](const Bf16View& view, const py::kwargs& how) {
             if (!how.contains("copy") || how["copy"].is_none() || !how["copy"].cast<bool>())
               return dlpack_of(*view.tensor, view.owner);
             auto copy = std::make_unique<Bf16Tensor>(*view.tensor);
             const py::capsule owner(copy.get(), [](void* p) { delete static_cast<Bf16Tensor*>(p); });
             return dlpack_of(*copy.release(), owner);
           })
      .def("__dlpack_device__", [](const Bf16View&) {
        return std::pair{1, 0};
      });

  py::class_<Capture, std::shared_ptr<Capture>> capture(
      m, "Capture",
      "One attention call: its inputs and, if recorded, its outputs (docs/captures.md).\n\n"
      "Tensors are [B,S,H,D], or [total,H,D] with cu_seqlens. BF16 goes in as uint16 words, "
      "ml_dtypes.bfloat16 "
      "or a bfloat16 torch\ntensor on the host (looked at through DLPack), and comes out as a read-only "
      "array "
      "of uint16 words over the capture's memory.\nlse is float32, [B,H,S] or [H,total].");
  const py::none none;
  capture.def(py::init(&make_capture), py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(),
              py::arg("softmax_scale"), py::arg("dout") = none, py::arg("out") = none, py::arg("lse") = none,
              py::arg("dq") = none, py::arg("dk") = none, py::arg("dv") = none, py::arg("causal") = false,
              py::arg("window") = std::pair{-1, -1}, py::arg("softcap") = 0.0,
              py::arg("deterministic") = true, py::arg("causal_alignment") = "bottom-right",
              py::arg("cu_seqlens_q") = none, py::arg("cu_seqlens_k") = none,
              py::arg("attributes") = py::dict(), py::arg("name") = "memory");
  const auto tensor = [&capture](const char* name, const auto& part) {
    capture.def_property_readonly(
        name, [part](const py::object& self) { return array_of(part(self.cast<const Capture&>()), self); });
  };
  tensor("q", [](const Capture& c) -> const Bf16Tensor& { return c.problem.q; });
  tensor("k", [](const Capture& c) -> const Bf16Tensor& { return c.problem.k; });
  tensor("v", [](const Capture& c) -> const Bf16Tensor& { return c.problem.v; });
  tensor("dout", [](const Capture& c) -> const Bf16Tensor& { return c.problem.dout; });
  tensor("out", [](const Capture& c) -> const Bf16Tensor& { return c.recorded.out; });
  tensor("lse", [](const Capture& c) -> const Fp32Tensor& { return c.recorded.lse; });
  tensor("dq", [](const Capture& c) -> const Bf16Tensor& { return c.recorded.dq; });
  tensor("dk", [](const Capture& c) -> const Bf16Tensor& { return c.recorded.dk; });
  tensor("dv", [](const Capture& c) -> const Bf16Tensor& { return c.recorded.dv; });
  tensor("dpsum", [](const Capture& c) -> const Fp32Tensor& { return c.recorded.intermediates.dpsum; });
  tensor("lse_log2", [](const Capture& c) -> const Fp32Tensor& { return c.recorded.intermediates.lse_log2; });
  tensor("dq_accum", [](const Capture& c) -> const Fp32Tensor& { return c.recorded.intermediates.dq_accum; });
  capture.def(
      "dlpack", &view_of, py::arg("name"),
      "A BF16 tensor by name for torch.from_dlpack: a bfloat16 tensor over the capture's memory, without a "
      "copy. Not to be written to.");
  capture.def_readonly("name", &Capture::name)
      .def_property_readonly("backend", [](const Capture& c) { return c.recorded.backend; })
      .def_property_readonly("notes", [](const Capture& c) { return c.recorded.notes; })
      .def_property_readonly("softmax_scale", [](const Capture& c) { return c.problem.softmax_scale; })
      .def_property_readonly("causal", [](const Capture& c) { return c.problem.causal; })
      .def_property_readonly("window",
                             [](const Capture& c) {
                               return std::pair{c.problem.window_left, c.problem.window_right};
                             })
      .def_property_readonly("softcap", [](const Capture& c) { return c.problem.softcap; })
      .def_property_readonly("deterministic", [](const Capture& c) { return c.problem.deterministic; })
      .def_property_readonly(
          "causal_alignment",
          [](const Capture& c) {
            return c.problem.causal_alignment == CausalAlignment::top_left ? "top-left" : "bottom-right";
          })
      .def_property_readonly("cu_seqlens_q", [](const Capture& c) { return c.problem.cu_seqlens_q; })
      .def_property_readonly("cu_seqlens_k", [](const Capture& c) { return c.problem.cu_seqlens_k; })
      .def_property_readonly("attributes", [](const Capture& c) { return attributes_of(c.problem); })
      .def("__repr__", [](const Capture& c) {
        const std::string& backend = c.recorded.backend;
        return "<bitattn.Capture " + c.name +
               (backend.empty() || backend == "recorded" ? "" : " by " + backend) + ", q " +
               shape_text(c.problem.q.shape) + ", k " + shape_text(c.problem.k.shape) + ">";
      });

  m.def("list_captures", &captures_in, py::arg("path"),
        "Names of all captures in a file or folder, as FILE.h5:/group.");
  m.def("load", &load, py::arg("name"),
        "The capture FILE.h5:/group, or the only one of FILE.h5, checked in full.");
  m.def("save", &save, py::arg("path"), py::arg("captures"),
        "Writes captures by group ({\"/step_000100/layer_3\": capture}) to a new file, whole or not at all.");
  m.def("import_tensors", &import_tensors, py::arg("files"), py::arg("output"), py::kw_only(),
        py::arg("names") = std::map<std::string, std::string>{}, py::arg("layout") = "",
        py::arg("round") = false, py::arg("softmax_scale") = none, py::arg("causal") = none,
        py::arg("window") = none, py::arg("softcap") = none, py::arg("causal_alignment") = none,
        py::arg("attributes") = py::dict(),
        "Tensors of .safetensors, .npz, .npy or HDF5 files as captures of a new file: `bitattn import`. "
        "Returns the groups.");
  m.def("info", &info, py::arg("capture"), "What `bitattn info --json` says of a capture.");
  m.def(
      "backends",
      [] {
        py::dict names;
        for (const BackendInfo& backend : backends()) names[py::str(backend.name)] = backend.description;
        return names;
      },
      "What can compute a capture, by name.");
  m.def("verify", &verify, py::arg("capture"), py::arg("backend") = "fa3", py::kw_only(),
        py::arg("progress") = none,
        "Emulated kernel against the recorded bits: what `bitattn verify --json` says of a capture. "
        "Releases the GIL; progress(stage, share).");
  m.def("compare", &compare, py::arg("capture"), py::arg("a"), py::arg("b"), py::kw_only(),
        py::arg("progress") = none, "Two backends on one problem, bit by bit. Releases the GIL.");
  m.def("compare_recorded", &compare_recorded, py::arg("a"), py::arg("b"),
        "The recorded outputs of two captures of the same problem, bit by bit. Releases the GIL.");
  m.def("run", &run, py::arg("capture"), py::arg("backend"), py::kw_only(), py::arg("progress") = none,
        "A capture of the same problem with the outputs of a backend. Releases the GIL.");
  m.def(
      "diagnose", &diagnose, py::arg("capture"), py::arg("backend") = "fa3", py::kw_only(),
      py::arg("reference") = "reference", py::arg("rows") = "", py::arg("worst") = 8,
      py::arg("blame") = "worst", py::arg("remedies") = true, py::arg("progress") = none,
      "Row-max residue, score-gradient sums, leak, errors and the rounding sites that own them: what "
      "`bitattn "
      "diagnose --json` says of one capture. reference=None: no truth; blame: none, worst or all; remedies: "
      "tried where that is cheap. Releases the GIL.");
  m.def("witness", &witness, py::arg("capture"),
        "Laws of exact gradients in the recorded tensors alone: what `bitattn witness --json` says of a "
        "capture. Releases the GIL.");
  m.def(
      "identify", &identify, py::arg("capture"), py::kw_only(), py::arg("remedies") = true,
      py::arg("progress") = none,
      "The kernel, remedy or deviation that gives every recorded bit: what `bitattn identify --json` says of "
      "a capture. remedies: fa3's are tried too. Releases the GIL.");
  m.def(
      "generate",
      [](const std::string& regime, std::size_t batch, std::size_t heads_q, std::size_t heads_kv,
         std::size_t seqlen_q, std::size_t seqlen_k, std::size_t head_dim, bool causal,
         std::pair<int, int> window, double softcap, double softmax_scale, std::uint64_t seed,
         double key_shift) {
        return generated({regime, batch, heads_q, heads_kv == 0 ? heads_q : heads_kv, seqlen_q,
                          seqlen_k == 0 ? seqlen_q : seqlen_k, head_dim, causal, window.first, window.second,
                          softcap, softmax_scale, seed, key_shift});
      },
      py::arg("regime") = "normal", py::kw_only(), py::arg("batch") = 1, py::arg("heads_q") = 1,
      py::arg("heads_kv") = 0, py::arg("seqlen_q") = 256, py::arg("seqlen_k") = 0, py::arg("head_dim") = 128,
      py::arg("causal") = false, py::arg("window") = std::pair{-1, -1}, py::arg("softcap") = 0.0,
      py::arg("softmax_scale") = 0.0, py::arg("seed") = 0, py::arg("key_shift") = 0.0,
      "A synthetic problem of a regime: same seed, same bits. 0 for heads_kv and seqlen_k: as the queries'.");
}

}  // namespace bitattn::python
