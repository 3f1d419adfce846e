#include "cli/page/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "audit/ranking.hpp"
#include "cli/diagnosis_json.hpp"
#include "cli/page/build.hpp"
#include "cli/page/html.hpp"
#include "cli/page/sections.hpp"

namespace bitattn::cli::page {

namespace {

/// The template with its places filled, in their order; what is put in is not looked through for places.
std::string filled(const std::string& text,
                   std::initializer_list<std::pair<const char*, const std::string*>> places) {
  std::string page;
  std::size_t from = 0;
  for (const auto& [name, with] : places) {
    const std::string place = "{{" + std::string(name) + "}}";
    const std::size_t at = text.find(place, from);
    page.append(text, from, at - from);
    page += *with;
    from = at + place.size();
  }
  return page.append(text, from, std::string::npos);
}

/// The verdict of one capture among many, which the page's own heading stands above.
std::string as_paragraph(std::string head) {
  for (const auto& [from, to] :
       {std::pair<std::string, std::string>{"<h1>", "<p class=\"verdict\">"}, {"</h1>", "</p>"}}) {
    const std::size_t at = head.find(from);
    if (at != std::string::npos) head.replace(at, from.size(), to);
  }
  return head;
}

/// Layer and step that a capture names, in a line below its name.
std::string origin_of(const Json& one) {
  const std::string layer = text_at(one, "/layer");
  const Json& step = at(one, "/step");
  if (layer.empty() && step.is_null()) return "";
  std::string text = layer.empty() ? "" : "layer " + layer;
  if (!step.is_null()) text += (text.empty() ? "step " : ", step ") + step.dump();
  return "<br/><span class=\"soft\">" + text + "</span>";
}

/// A row of the index.
std::string index_line(const Json& one, std::size_t number, const std::string& link) {
  const bool backward = !at(one, "/leak").is_null();
  const Json& bits = at(one, "/against_recorded");
  std::string text =
      fmt::format("<tr data-capture=\"{}\"><td class=\"left name\">{}{}</td>", number, link, origin_of(one));
  text += "<td>" + (backward ? figure(one, "/leak/p_weighted_key", Style::share) : "forward only") + "</td>";
  text += "<td>" + figure(one, "/errors/dq/before_cast", Style::share) + "</td><td>" +
          figure(one, "/condition") + "</td>";
  text += "<td>" + figure(one, drift_pointer(one) + "/rms") + "</td>";
  text += "<td>" + figure(one, "/row_max_residue/largest") + "</td><td>" +
          figure(one, "/row_max_residue/rows", Style::count) + "</td>";
  text += "<td>" +
          (bits.is_null() ? std::string("nothing recorded")
           : at(bits, "/equal") == true
               ? std::string("all equal")
               : figure(one, "/against_recorded/differing_bits", Style::count) + " differ") +
          "</td></tr>";
  return text;
}

}  // namespace

std::string version_text() {
  const std::string commit = kCommit;
  return std::string("bitattn ") + kVersion + (commit.empty() ? "" : " (commit " + commit + ")");
}

bool Page::comes_before(const Entry& a, const Entry& b) {
  return std::isnan(b.leak) ? !std::isnan(a.leak) : a.leak > b.leak;
}

Page::Sections Page::sections(const Capture& capture, const audit::Diagnosis& diagnosis, const Json& one) {
  Sections sections;
  sections.head = "<p class=\"kicker\">" + subject_line(one, capture.problem) + "</p>" + head_of(one);
  sections.rest = cause_section(one) + blame_section(one) + errors_section(one) + specials_section(one) +
                  remedies_section(one) + rows_map_section(capture, diagnosis, one) + heads_section(one) +
                  worst_rows_section(one, !diagnosis.chosen.empty()) + bits_section(one) +
                  witness_section(one) + provenance_section(one, capture.problem);
  return sections;
}

bool Page::shows(double leak) const {
  Entry entry;
  entry.leak = leak;
  const auto place = std::upper_bound(entries_.begin(), entries_.end(), entry, comes_before);
  return place - entries_.begin() < static_cast<std::ptrdiff_t>(kDetailed);
}

void Page::add(const Json& one, Sections sections) {
  Entry entry;
  entry.number = entries_.size();
  entry.leak = number_at(one, "/leak/p_weighted_key");
  entry.name = text_at(one, "/capture");
  const auto place = std::upper_bound(entries_.begin(), entries_.end(), entry, comes_before);
  entry.line = index_line(one, entry.number, entry.name);
  if (shows(entry.leak) && !sections.rest.empty()) {
    entry.line = index_line(one, entry.number,
                            fmt::format("<a href=\"#capture-{}\">{}</a>", entry.number, entry.name));
    entry.sections = std::move(sections);
  }
  entries_.insert(place, std::move(entry));
  if (entries_.size() > kDetailed) {
    // Out of the detailed ones: its line leads nowhere any more.
    Entry& dropped = entries_[kDetailed];
    dropped.sections = {};
    const std::string link = fmt::format("<a href=\"#capture-{}\">{}</a>", dropped.number, dropped.name);
    const std::size_t at = dropped.line.find(link);
    if (at != std::string::npos) dropped.line.replace(at, link.size(), dropped.name);
  }
}

std::string Page::plain_heading() const {
  const auto leaking = static_cast<std::size_t>(std::count_if(
      entries_.begin(), entries_.end(), [](const Entry& e) { return e.leak > audit::kLeakOfCasts; }));
  const auto unknown = static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) { return std::isnan(e.leak); }));
  return fmt::format(
      "<p class=\"kicker\">bitattn diagnose</p><h1>{} of {} {} more into dQ than the BF16 casts cost "
      "anyway{}.</h1>",
      grouped(leaking), counted(entries_.size(), "capture"), leaking == 1 ? "leaks" : "leak",
      unknown > 0 ? fmt::format("; of {} the leak is not known", grouped(unknown)) : "");
}

std::string Page::html() const {
  std::string content;
  if (entries_.size() == 1) {
    const Entry& only = entries_.front();
    content += "<article data-capture=\"0\"><p class=\"kicker\">" + only.name + "</p>" + only.sections.head +
               only.sections.rest + "</article>";
  } else {
    content += introduction_.empty() ? plain_heading() : introduction_ + "<h2>Captures</h2>";
    content +=
        "<p class=\"soft\">Worst leak first. Shares are of |dQ|; the sum and the residue should be 0.</p>";
    content +=
        "<div class=\"scroll\"><table><thead><tr><th class=\"left\">capture</th><th "
        "class=\"leak\">leak<br/>of |dQ|</th><th>dQ error<br/>of |dQ|</th>"
        "<th>condition</th><th class=\"drift\">score-gradient<br/>sum, RMS</th><th "
        "class=\"residue\">residue,<br/>largest</th><th>rows</th><th>recorded<br/>bits</th>"
        "</tr></thead><tbody>";
    for (const Entry& entry : entries_) content += entry.line;
    content += "</tbody></table></div>\n";
    bool first = true;
    for (const Entry& entry : entries_) {
      if (entry.sections.rest.empty()) continue;
      content +=
          fmt::format("<details{}><summary>{}</summary><article id=\"capture-{}\" data-capture=\"{}\">",
                      first ? " open=\"open\"" : "", entry.name, entry.number, entry.number);
      content += as_paragraph(entry.sections.head) + entry.sections.rest + "</article></details>\n";
      first = false;
    }
    if (entries_.size() > kDetailed) {
      content += fmt::format("<p class=\"note\">Sections are kept of the worst {} captures.</p>", kDetailed);
    }
  }
  content += "<footer><p>" + escaped(version_text()) + " · <span class=\"mono\">" + escaped(command_) +
             "</span></p><p>Every figure is defined in docs/diagnose.md; each carries its exact value and "
             "its key in the output of --json "
             "(attributes value and data-key).</p></footer>";
  const std::string generator = escaped(version_text());
  const std::string title =
      (entries_.size() == 1 ? entries_.front().name : counted(entries_.size(), "capture")) +
      " · bitattn diagnose";
  return filled(kTemplate, {{"generator", &generator}, {"title", &title}, {"content", &content}});
}

}  // namespace bitattn::cli::page
