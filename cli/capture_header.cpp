#include "cli/capture_header.hpp"

#include <fmt/format.h>

#include <cmath>

#include "cli/table.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::cli {

std::string kernel_text(const Problem& problem) {
  std::string text = printable(problem.text("kernel", "not named"));
  const std::string version = printable(problem.text("kernel_version"));
  const std::string device = printable(problem.text("device"));
  if (!version.empty()) text += " (" + version + ")";
  if (!device.empty()) text += " on " + device;
  return text;
}

namespace {

std::string shape_line(const Problem& p) {
  const bool packed = p.layout == Layout::thd;
  std::string text =
      packed ? fmt::format("THD, {} packed, {} queries and {} keys in all, longest {} and {}",
                           counted(p.batch, "sequence"), p.total_q(), p.total_k(), p.seqlen_q, p.seqlen_k)
             : fmt::format("BSHD, batch {}, {} queries, {} keys", p.batch, p.seqlen_q, p.seqlen_k);
  text += fmt::format(", heads {}", p.heads_q);
  if (p.heads_kv != p.heads_q) text += fmt::format(" over {}", p.heads_kv);
  text += fmt::format(", head size {}", p.head_dim);
  if (p.head_dim_v != p.head_dim) text += fmt::format(" (v {})", p.head_dim_v);
  return text;
}

std::string mask_text(const Problem& p) {
  std::string text = p.causal ? "causal" : "full";
  if (p.window_left >= 0 || p.window_right >= 0) {
    text = fmt::format("{}local, window {}:{}", p.causal ? "causal and " : "", p.window_left, p.window_right);
  }
  if (p.causal_alignment == CausalAlignment::top_left && text != "full") text += ", aligned top left";
  text += fmt::format("; softmax_scale {}", shortest_text(p.softmax_scale));
  text += p.softcap > 0 ? fmt::format("; softcap {}", shortest_text(p.softcap)) : "";
  text += p.deterministic ? "" : "; backward not deterministic";
  return text;
}

std::string inputs_line(const audit::InputSummary& s, Layout layout) {
  const auto number = [](double x) {
    return std::isnan(x) ? std::string("- (none finite)") : fmt::format("{:.3g}", x);
  };
  std::string text = fmt::format("mean |q| {}, mean |k| {}, |mean key| up to {}; ", number(s.mean_q_norm),
                                 number(s.mean_k_norm), number(s.largest_mean_key_norm));
  if (s.visible_pairs == 0) return text + "no visible pair, so no logit";
  text += "largest logit " + number(s.largest_logit);
  if (!std::isnan(s.largest_logit)) {
    text += fmt::format(" ({}{}, h {}, i {}, j {})", layout == Layout::thd ? "sequence " : "b ",
                        s.logit_sequence, s.logit_head, s.logit_row, s.logit_key);
  }
  if (s.logit_rows < s.logit_all_rows) {
    text += fmt::format(" of every {}th row", (s.logit_all_rows + s.logit_rows - 1) / s.logit_rows);
  }
  return text;
}

std::string origin_text(const Problem& p) {
  std::string text;
  for (const char* name : {"regime", "seed", "step", "layer", "heads_kept"}) {
    const std::string value = printable(p.text(name), 60);
    if (!value.empty()) text += (text.empty() ? "" : ", ") + std::string(name) + " " + value;
  }
  return text;
}

}  // namespace

std::vector<std::string> tensor_names(const Result& r) {
  std::vector<std::string> names;
  const auto add = [&names](const char* name, const auto& tensor) {
    if (!tensor.empty()) names.emplace_back(name);
  };
  add("out", r.out);
  add("lse", r.lse);
  add("dq", r.dq);
  add("dk", r.dk);
  add("dv", r.dv);
  add("dpsum", r.intermediates.dpsum);
  add("lse_log2", r.intermediates.lse_log2);
  add("dq_accum", r.intermediates.dq_accum);
  add("dk_accum", r.intermediates.dk_accum);
  add("dv_accum", r.intermediates.dv_accum);
  return names;
}

std::string specials_text(const std::vector<audit::SpecialValues>& specials, Layout layout) {
  Table table;
  table.column("tensor", true).column("NaN").column("inf").column("in", true).column("first at", true);
  for (const audit::SpecialValues& s : specials) {
    table.row({s.tensor, grouped(s.nans), grouped(s.infinities),
               counted(s.rows_or_keys, s.of_keys ? "key" : "query row"),
               s.first ? s.first->text(layout) : ""});
  }
  return table.empty() ? "" : table.text(4);
}

Json specials_json(const std::vector<audit::SpecialValues>& specials) {
  Json json = Json::array();
  for (const audit::SpecialValues& s : specials) {
    json.push_back({{"tensor", s.tensor},
                    {"nan", s.nans},
                    {"infinite", s.infinities},
                    {s.of_keys ? "keys" : "rows", s.rows_or_keys},
                    {"first", s.first ? json_place(*s.first) : Json(nullptr)}});
  }
  return json;
}

namespace {

/// A name, and its text wrapped beside it.
std::string beside(const std::string& name, const std::string& what) {
  std::string lines = wrapped(what, 12);
  lines.replace(2, name.size(), name);
  return lines;
}

std::string header_text(const Capture& capture, const audit::InputSummary* inputs) {
  const Problem& p = capture.problem;
  std::string recorded;
  for (const std::string& name : tensor_names(capture.recorded))
    recorded += (recorded.empty() ? "" : ", ") + name;
  std::string text = printable(capture.name, 4096) + "\n";
  text += beside("kernel", kernel_text(p));
  text += beside("shape", shape_line(p) + (p.dout.empty() ? "; forward only (no dout)" : ""));
  text += beside("mask", mask_text(p));
  if (inputs != nullptr) text += beside("inputs", inputs_line(*inputs, p.layout));
  const std::string origin = origin_text(p);
  if (!origin.empty()) text += beside("from", origin);
  return text + beside("recorded", recorded.empty() ? "nothing" : recorded);
}

}  // namespace

std::string capture_title(const Capture& capture) {
  return header_text(capture, nullptr);
}

std::string capture_header(const Capture& capture, const audit::InputSummary& inputs) {
  std::string text = header_text(capture, &inputs);
  if (!inputs.specials.empty()) {
    text +=
        "  NaN and infinities among the inputs:\n" + specials_text(inputs.specials, capture.problem.layout);
  }
  return text;
}

Json capture_json(const Capture& capture, const audit::InputSummary& inputs) {
  const Problem& p = capture.problem;
  Json json;
  json["capture"] = capture.name;
  json["kernel"] = p.text("kernel");
  json["kernel_version"] = p.text("kernel_version");
  json["device"] = p.text("device");
  json["layout"] = p.layout == Layout::thd ? "THD" : "BSHD";
  json["batch"] = p.batch;
  json["seqlen_q"] = p.seqlen_q;
  json["seqlen_k"] = p.seqlen_k;
  json["total_q"] = p.total_q();
  json["total_k"] = p.total_k();
  json["heads_q"] = p.heads_q;
  json["heads_kv"] = p.heads_kv;
  json["head_dim"] = p.head_dim;
  json["head_dim_v"] = p.head_dim_v;
  json["softmax_scale"] = json_number(p.softmax_scale);
  json["causal"] = p.causal;
  json["causal_alignment"] = p.causal_alignment == CausalAlignment::top_left ? "top-left" : "bottom-right";
  json["window_left"] = p.window_left;
  json["window_right"] = p.window_right;
  json["softcap"] = json_number(p.softcap);
  json["deterministic"] = p.deterministic;
  json["backward"] = !p.dout.empty();
  json["visible_pairs"] = inputs.visible_pairs;
  json["norms"] = {{"mean_q", json_number(inputs.mean_q_norm)},
                   {"mean_k", json_number(inputs.mean_k_norm)},
                   {"mean_v", json_number(inputs.mean_v_norm)},
                   {"mean_dout", json_number(inputs.mean_dout_norm)},
                   {"largest_mean_key", json_number(inputs.largest_mean_key_norm)}};
  // Without a pair whose score is a number it has no place.
  const auto place = [&](std::size_t at) {
    return std::isnan(inputs.largest_logit) ? Json(nullptr) : Json(at);
  };
  json["largest_logit"] = {{"value", json_number(inputs.largest_logit)},
                           {"b", place(inputs.logit_sequence)},
                           {"h", place(inputs.logit_head)},
                           {"i", place(inputs.logit_row)},
                           {"j", place(inputs.logit_key)},
                           {"rows_looked_at", inputs.logit_rows},
                           {"rows", inputs.logit_all_rows}};
  json["recorded"] = tensor_names(capture.recorded);
  json["not_finite_inputs"] = specials_json(inputs.specials);
  return json;
}

}  // namespace bitattn::cli
