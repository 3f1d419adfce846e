#include "datasets/import.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <set>
#include <string_view>

#include "datasets/deviate.hpp"
#include "datasets/error.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

/// How the tensors of a capture are called elsewhere.
const std::map<std::string, std::vector<std::string>>& usual_names() {
  static const std::map<std::string, std::vector<std::string>> kNames{
      {"q", {"q", "query", "query_states", "query_layer", "queries"}},
      {"k", {"k", "key", "key_states", "key_layer", "keys"}},
      {"v", {"v", "value", "value_states", "value_layer", "values"}},
      {"out", {"out", "o", "output", "attn_output", "context", "context_layer"}},
      {"lse", {"lse", "softmax_lse", "logsumexp"}},
      {"dout", {"dout", "do", "d_out", "grad_out", "grad_output", "out_grad", "output_grad"}},
      {"dq", {"dq", "d_q", "grad_q", "q_grad", "grad_query", "query_grad"}},
      {"dk", {"dk", "d_k", "grad_k", "k_grad", "grad_key", "key_grad"}},
      {"dv", {"dv", "d_v", "grad_v", "v_grad", "grad_value", "value_grad"}},
      {"cu_seqlens_q", {"cu_seqlens_q", "cu_seqlens"}},
      {"cu_seqlens_k", {"cu_seqlens_k", "cu_seqlens"}}};
  return kNames;
}

struct Split {
  std::string prefix, last;
};

/// "layers.3/attn.q" as "layers.3/attn" and "q".
Split split(const std::string& name) {
  const std::size_t at = name.find_last_of("./");
  if (at == std::string::npos) return {"", name};
  return {name.substr(0, at), name.substr(at + 1)};
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c; });
  return text;
}

bool is_usual(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), lower(name)) != names.end();
}

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

/// Tensor of a capture to its name in the file.
using Names = std::map<std::string, std::string>;

class Importer {
 public:
  Importer(const std::string& where, const ForeignFile& file, const ImportOptions& options)
      : where_(where), file_(file), options_(options) {}

  std::vector<ImportedCapture> all() {
    check_options();
    std::vector<ImportedCapture> captures;
    std::string several;
    for (const auto& [prefix, names] : candidates()) {
      captures.push_back(one(prefix, names));
      several += (several.empty() ? "" : ", ") + (prefix.empty() ? "(no prefix)" : printable(prefix));
    }
    if (captures.empty()) {
      std::string found;
      for (const auto& [name, tensor] : file_.tensors) found += (found.empty() ? "" : ", ") + printable(name);
      std::string missing;
      for (const std::string own : {"q", "k", "v"})
        if (!options_.names.contains(own) && !has_usual_name(own)) missing += " --map " + own + "=NAME";
      if (missing.empty()) missing = " --map q=NAME --map k=NAME --map v=NAME";  // each below another prefix
      fail("no q, k and v by their usual names among " + (found.empty() ? "no tensors" : printable(found)) +
           "; expected" + missing);
    }
    if (captures.size() > 1 && !options_.names.empty())
      fail("--map fits one capture, found several: " + several);
    return captures;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw InputError(where_ + ": " + what); }

  void check_options() const {
    const auto& usual = usual_names();
    for (const auto& [tensor, name] : options_.names) {
      if (!usual.contains(tensor)) {
        std::string known;
        for (const auto& [other, names] : usual) known += (known.empty() ? "" : ", ") + other;
        fail("--map " + printable(tensor) + "=" + printable(name) + ": expected one of " + known);
      }
      if (!file_.tensors.contains(name))
        fail("--map " + tensor + "=" + printable(name) + ": the file has no tensor of that name");
    }
    static const std::set<std::string> kLayouts{"", "BSHD", "BHSD", "SBHD", "THD"};
    if (!kLayouts.contains(options_.layout))
      fail("--layout " + printable(options_.layout) + ": expected BSHD, BHSD, SBHD or THD");
  }

  bool has_usual_name(const std::string& own) const {
    return std::any_of(file_.tensors.begin(), file_.tensors.end(), [&](const auto& tensor) {
      return is_usual(usual_names().at(own), split(tensor.first).last);
    });
  }

  std::map<std::string, Names> candidates() const {
    std::map<std::string, Names> found;
    for (const auto& [name, tensor] : file_.tensors) {
      const Split parts = split(name);
      for (const auto& [own, names] : usual_names()) {
        if (options_.names.contains(own)) continue;
        if (!is_usual(names, parts.last)) continue;
        const auto [at, fresh] = found[parts.prefix].emplace(own, name);
        if (!fresh) {
          fail(joined({"tensors ", printable(at->second), " and ", printable(name), " could both be ", own,
                       "; expected --map ", own, "=NAME"}));
        }
      }
    }
    if (!options_.names.empty() && found.empty()) found[""] = {};
    std::map<std::string, Names> captures;
    for (auto& [prefix, names] : found) {
      names.insert(options_.names.begin(), options_.names.end());
      if (names.contains("q") && names.contains("k") && names.contains("v")) captures[prefix] = names;
    }
    return captures;
  }

  const ForeignTensor* tensor(const Names& names, const std::string& own) const {
    const auto found = names.find(own);
    return found == names.end() ? nullptr : &file_.tensors.at(found->second);
  }

  // --- numbers

  static std::uint64_t word(const ForeignTensor& tensor, std::size_t i, std::size_t size) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data() + i * size, size);  // little-endian, as every machine of ours
    return bits;
  }

  static double half_value(std::uint64_t bits) {
    const auto exponent = static_cast<int>(bits >> 10U & 31U);
    const auto mantissa = static_cast<double>(bits & 1023U);
    double value = 0;
    if (exponent == 31) {
      value = mantissa == 0 ? HUGE_VAL : std::nan("");
    } else {
      value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    }
    return (bits & 0x8000U) != 0 ? -value : value;
  }

  /// BF16 words of a tensor, still in the file's layout. Counts what had to be rounded.
  Bf16Tensor words(const Names& names, const std::string& own, ImportedCapture& import) const {
    Bf16Tensor result;
    const ForeignTensor* source = tensor(names, own);
    if (source == nullptr) return result;
    const std::string name = "tensor " + printable(names.at(own)) + " for " + own;
    import.taken.push_back(own + " from " + printable(names.at(own)));
    const std::size_t n = checked_elements(source->shape, where_ + ": " + name);
    result.shape = source->shape;
    result.data.resize(n);
    const std::string& type = source->type;
    if (type == "bf16" || type == "u16" || type == "i16") {
      if (n > 0) std::memcpy(result.data.data(), source->bytes.data(), n * 2);
      return result;
    }
    if (type != "fp16" && type != "fp32" && type != "fp64")
      fail(name + " has type " + printable(type) + ", expected BF16, words of 16 bits, or floating point");
    const std::size_t size = foreign_element_size(type);
    std::size_t inexact = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t bits = word(*source, i, size);
      double value = 0;
      if (type == "fp16") {
        value = half_value(bits);
      } else if (type == "fp32") {
        value = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
      } else {
        value = std::bit_cast<double>(bits);
      }
      const bool is_nan = std::isnan(value);
      result.data[i] = is_nan ? std::uint16_t{0x7fff} : bf16_from_double(value);
      const auto back = static_cast<double>(std::bit_cast<float>(std::uint32_t{result.data[i]} << 16U));
      if (!is_nan && back != value) {
        if (inexact++ == 0 && !options_.round) {
          fail(joined({name, " is ", type, " and element ", std::to_string(i), ", ", shortest_text(value),
                       ", is no BF16 number; expected BF16, or --round to round to nearest even"}));
        }
      }
    }
    import.rounded += inexact;
    return result;
  }

  // --- layout

  /// The file's axes in the order [B,S,H,D], by layout.
  std::array<std::size_t, 4> axes() const {
    if (options_.layout == "BHSD") return {0, 2, 1, 3};
    if (options_.layout == "SBHD") return {1, 0, 2, 3};
    return {0, 1, 2, 3};
  }

  /// To [B,S,H,D], or as it is for THD. `heads`: of a tensor whose last two axes were one in the file.
  Bf16Tensor in_order(Bf16Tensor source, bool packed, std::size_t heads, const std::string& own) const {
    if (source.empty()) return source;
    const std::size_t expected = packed ? 3 : 4;
    if (source.shape.size() == expected - 1 && heads > 0 && source.shape.back() % heads == 0) {
      const std::size_t columns = source.shape.back() / heads;
      source.shape.back() = heads;
      source.shape.push_back(columns);
      if (options_.layout == "BHSD") fail("tensor " + own + " has three axes, expected four for BHSD");
    }
    if (source.shape.size() != expected) {
      fail("tensor " + own + " has shape " + shape_text(source.shape) + ", expected " +
           (packed ? "three axes [tokens, heads, head size] and cu_seqlens"
                   : "four axes, in the order of --layout"));
    }
    if (packed) return source;
    const std::array<std::size_t, 4> from = axes();
    Bf16Tensor turned;
    for (const std::size_t axis : from) turned.shape.push_back(source.shape[axis]);
    std::array<std::size_t, 4> strides{};
    std::size_t stride = 1;
    for (std::size_t axis = 4; axis-- > 0; stride *= source.shape[axis]) strides[axis] = stride;
    turned.data.reserve(source.data.size());
    const auto& s = turned.shape;
    for (std::size_t b = 0; b < s[0]; ++b) {
      for (std::size_t t = 0; t < s[1]; ++t) {
        for (std::size_t h = 0; h < s[2]; ++h) {
          const std::size_t at = b * strides[from[0]] + t * strides[from[1]] + h * strides[from[2]];
          for (std::size_t d = 0; d < s[3]; ++d)
            turned.data.push_back(source.data[at + d * strides[from[3]]]);
        }
      }
    }
    return turned;
  }

  std::vector<std::int32_t> offsets(const Names& names, const std::string& own) const {
    const ForeignTensor* source = tensor(names, own);
    if (source == nullptr) fail("tensor " + own + " is missing, expected for packed sequences (THD)");
    const std::size_t size = foreign_element_size(source->type);
    if (source->shape.size() != 1 || size < 4 || (source->type[0] != 'i' && source->type[0] != 'u'))
      fail("tensor " + own + " is " + printable(source->type) + " " + shape_text(source->shape) +
           ", expected one axis of integers");
    std::vector<std::int32_t> values;
    for (std::size_t i = 0; i < source->shape[0]; ++i) {
      const std::uint64_t bits = word(*source, i, size);
      if (bits > 0x7fffffffU) fail(own + "[" + std::to_string(i) + "] is out of range");
      values.push_back(static_cast<std::int32_t>(bits));
    }
    return values;
  }

  Fp32Tensor row_values(const Names& names, const Problem& problem) const {
    const ForeignTensor* source = tensor(names, "lse");
    if (source == nullptr) return {};
    std::vector<std::size_t> shape = source->shape;
    const std::vector<std::size_t> rows = problem.row_shape();
    if (shape.size() == rows.size() + 1 && shape.back() == 1) shape.pop_back();
    if (source->type != "fp32" || shape != rows)
      fail("tensor lse is " + printable(source->type) + " " + shape_text(source->shape) +
           ", expected float32 " + shape_text(rows));
    Fp32Tensor lse(rows);
    if (!lse.data.empty()) std::memcpy(lse.data.data(), source->bytes.data(), lse.data.size() * 4);
    return lse;
  }

  // --- one capture

  /// What the file says of a name: beside the capture, or for the whole file.
  const Attribute* said(const std::string& prefix, const std::string& name) const {
    for (const std::string& key : {joined({prefix, "/", name}), joined({prefix, ".", name}), name}) {
      const auto found = file_.attributes.find(key);
      if (found != file_.attributes.end()) return &found->second;
    }
    return nullptr;
  }

  std::optional<double> number(const std::string& prefix, const std::string& name) const {
    const Attribute* value = said(prefix, name);
    if (value == nullptr) return std::nullopt;
    if (const auto* real = std::get_if<double>(value)) return *real;
    if (const auto* integer = std::get_if<std::int64_t>(value)) return static_cast<double>(*integer);
    const std::string text = lower(std::get<std::string>(*value));
    if (text == "true" || text == "false") return text == "true" ? 1 : 0;
    std::size_t used = 0;
    try {
      const double parsed = std::stod(text, &used);
      if (used == text.size()) return parsed;
    } catch (const std::exception&) {
    }
    fail("attribute " + name + " is \"" + printable(text, 40) + "\", expected a number");
  }

  int window(const std::string& prefix, const std::string& name, std::optional<int> option) const {
    if (option) return *option;
    const double value = number(prefix, name).value_or(-1);
    if (value != std::floor(value) || value < -1 || value > 0x7fffffff)
      fail("attribute " + name + " is " + shortest_text(value) + ", expected -1 (no limit) or more");
    return static_cast<int>(value);
  }

  void take_attributes(const std::string& prefix, Problem& p) const {
    const auto scale = options_.softmax_scale ? options_.softmax_scale : number(prefix, "softmax_scale");
    if (!scale) {
      fail("softmax_scale is not said, expected --scale (1/sqrt(head size) is " +
           shortest_text(1 / std::sqrt(static_cast<double>(p.head_dim))) + ")");
    }
    p.softmax_scale = *scale;
    p.causal = options_.causal.value_or(number(prefix, "causal").value_or(0) != 0);
    p.window_left = window(prefix, "window_left", options_.window_left);
    p.window_right = window(prefix, "window_right", options_.window_right);
    p.softcap = options_.softcap.value_or(number(prefix, "softcap").value_or(0));
    p.deterministic = number(prefix, "deterministic").value_or(1) != 0;
    std::string alignment = "bottom-right";
    const Attribute* said_alignment = said(prefix, "causal_alignment");
    if (said_alignment != nullptr && std::holds_alternative<std::string>(*said_alignment))
      alignment = std::get<std::string>(*said_alignment);
    alignment = options_.causal_alignment.value_or(alignment);
    if (alignment != "bottom-right" && alignment != "top-left")
      fail("causal_alignment is \"" + printable(alignment, 40) + "\", expected bottom-right or top-left");
    p.causal_alignment = alignment == "top-left" ? CausalAlignment::top_left : CausalAlignment::bottom_right;
    for (const auto& [key, value] : file_.attributes) {
      const Split parts = split(key);
      const bool own = key.find('/') == std::string::npos || key.rfind(prefix + "/", 0) == 0;
      if (own && !is_problem_attribute(parts.last)) p.attributes[parts.last] = value;
    }
    // What tells a capture from the others of its file is its layer, where nothing else is said.
    if (!prefix.empty() && !p.attributes.contains("layer")) p.attributes["layer"] = prefix;
    for (const auto& [key, value] : options_.attributes) p.attributes[key] = value;
  }

  ImportedCapture one(const std::string& prefix, const Names& names) const {
    ImportedCapture import;
    std::string group = prefix;
    std::replace(group.begin(), group.end(), '/', '.');
    import.group = "/" + group;
    Problem& p = import.capture.problem;
    Result& r = import.capture.recorded;
    import.capture.name = where_ + (prefix.empty() ? "" : ": " + printable(prefix));
    p.q = words(names, "q", import);
    const bool packed = options_.layout == "THD" || (options_.layout.empty() && p.q.shape.size() == 3);
    p.layout = packed ? Layout::thd : Layout::bshd;
    import.layout = packed ? "THD" : options_.layout.empty() ? "BSHD" : options_.layout;
    p.q = in_order(std::move(p.q), packed, 0, "q");
    p.k = in_order(words(names, "k", import), packed, 0, "k");
    p.v = in_order(words(names, "v", import), packed, 0, "v");
    if (packed) {
      p.cu_seqlens_q = offsets(names, "cu_seqlens_q");
      p.cu_seqlens_k = offsets(names, "cu_seqlens_k");
    }
    set_sizes(p);
    p.dout = in_order(words(names, "dout", import), packed, p.heads_q, "dout");
    r.backend = "recorded";
    r.out = in_order(words(names, "out", import), packed, p.heads_q, "out");
    r.dq = in_order(words(names, "dq", import), packed, p.heads_q, "dq");
    r.dk = in_order(words(names, "dk", import), packed, p.heads_kv, "dk");
    r.dv = in_order(words(names, "dv", import), packed, p.heads_kv, "dv");
    if (p.dout.empty() && !(r.dq.empty() && r.dk.empty() && r.dv.empty()))
      fail("tensor dout is missing, expected beside dq, dk, dv");
    take_attributes(prefix, p);
    check_problem(p, where_);
    r.lse = row_values(names, p);
    check_result(p, r, where_);
    return import;
  }

  const std::string& where_;
  const ForeignFile& file_;
  const ImportOptions& options_;
};

}  // namespace

std::vector<ImportedCapture> import_captures(const std::string& where, const ForeignFile& file,
                                             const ImportOptions& options) {
  return Importer(where, file, options).all();
}

}  // namespace bitattn
