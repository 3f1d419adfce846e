#include "audit/moment.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <tuple>
#include <variant>

#include "datasets/error.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn::audit {

namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// The run of digits, or of other characters, that begins at `at`.
std::string_view part_at(std::string_view text, std::size_t at) {
  std::size_t end = at;
  while (end < text.size() && is_digit(text[end]) == is_digit(text[at])) ++end;
  return text.substr(at, end - at);
}

std::string_view without_zeros(std::string_view digits) {
  while (digits.size() > 1 && digits.front() == '0') digits.remove_prefix(1);
  return digits;
}

std::string text_of(const Attribute& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
  return shortest_text(std::get<double>(value));
}

/// 0 where the attribute is absent.
std::int64_t expected_number(const Attributes& attributes, const std::string& name,
                             const std::string& where) {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return 0;
  if (const std::optional<std::int64_t> number = whole_number(attributes, name)) return *number;
  throw InputError(where + ": attribute " + name + " is " + printable(text_of(found->second), 40) +
                   ", expected a whole number");
}

}  // namespace

std::optional<std::int64_t> whole_number(const Attributes& attributes, const std::string& name) {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return std::nullopt;
  if (const auto* number = std::get_if<std::int64_t>(&found->second)) return *number;
  if (const auto* number = std::get_if<double>(&found->second)) {
    constexpr double kMost = 9007199254740992;  // beyond it, not every whole number is a double
    if (std::trunc(*number) == *number && std::fabs(*number) <= kMost)
      return static_cast<std::int64_t>(*number);
    return std::nullopt;
  }
  const std::string& text = std::get<std::string>(found->second);
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end ? std::optional(value) : std::nullopt;
}

bool natural_less(const std::string& a, const std::string& b) {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    const std::string_view x = part_at(a, i);
    const std::string_view y = part_at(b, j);
    const bool numbers = is_digit(x.front()) && is_digit(y.front());
    // A number comes before any other text.
    if (!numbers && is_digit(x.front()) != is_digit(y.front())) return is_digit(x.front());
    const std::string_view p = numbers ? without_zeros(x) : x;
    const std::string_view q = numbers ? without_zeros(y) : y;
    if (numbers && p.size() != q.size()) return p.size() < q.size();
    if (p != q) return p < q;
    i += x.size();
    j += y.size();
  }
  if (i < a.size() || j < b.size()) return j < b.size();
  return a < b;  // 7 and 07 are different names
}

bool operator<(const Moment& a, const Moment& b) {
  if (a.step != b.step) return a.step < b.step;
  if (a.layer != b.layer) return natural_less(a.layer, b.layer);
  return std::tie(a.call, a.rank) < std::tie(b.call, b.rank);
}

Moment moment_of(const Attributes& attributes, const std::string& where, const std::string& group,
                 const std::string& place) {
  Moment moment;
  moment.step = expected_number(attributes, "step", where);
  moment.call = expected_number(attributes, "call", where);
  moment.rank = expected_number(attributes, "rank", where);
  const auto layer = attributes.find("layer");
  if (layer != attributes.end()) moment.layer = text_of(layer->second);
  const bool has_step = attributes.count("step") != 0;
  moment.said = has_step || !moment.layer.empty();
  if (moment.layer.empty()) moment.layer = has_step ? group : place;
  return moment;
}

}  // namespace bitattn::audit
