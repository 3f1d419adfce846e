#include "cli/output.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdio>

#include "datasets/error.hpp"

namespace bitattn::cli {

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void print_json(const Json& object) {
  // Names of files may hold any bytes; what is no UTF-8 is replaced.
  print(object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

void warn(const std::string& text) {
  std::fflush(stdout);
  std::fprintf(stderr, "bitattn: %s\n", one_line(text).c_str());
}

int finish_output(int code) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw InputError("standard output cannot be written");
  return code;
}

std::string one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    line += u < 0x20U || u == 0x7fU ? ' ' : c;
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::string brief_number(double x) {
  if (std::isnan(x)) return "-";
  if (x == 0) return "0";
  const double magnitude = std::abs(x);
  if (magnitude >= 0.1 && magnitude < 10) return fmt::format("{:.2g}", x);
  if (magnitude >= 10 && magnitude < 10000) return fmt::format("{:.0f}", x);
  return fmt::format("{:.1e}", x);
}

std::string plain_number(double x) {
  return std::isnan(x) ? "-" : fmt::format("{:.6g}", x);
}

std::string grouped(std::size_t n) {
  std::string digits = std::to_string(n);
  for (std::ptrdiff_t at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

std::string counted(std::size_t n, const std::string& noun) {
  return grouped(n) + " " + noun + (n == 1 ? "" : "s");
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string percent(double share) {
  if (std::isnan(share)) return "-";
  const double x = share * 100;
  if (x >= 1000) return fmt::format("{:.2g} times", share);
  return x >= 10 ? fmt::format("{:.0f}%", x) : fmt::format("{:.2g}%", x);
}

std::string figure(double x) {
  if (std::isnan(x)) return "-";
  return x == 0 ? "0" : fmt::format("{:.1e}", x);
}

const Json& at(const Json& json, const std::string& pointer) {
  static const Json kNull = nullptr;
  const Json::json_pointer where(pointer);
  return json.contains(where) ? json.at(where) : kNull;
}

double number_at(const Json& json, const std::string& pointer) {
  const Json& value = at(json, pointer);
  return value.is_number() ? value.get<double>() : std::nan("");
}

Json json_number(double x) {
  return std::isfinite(x) ? Json(x) : Json(nullptr);
}

Json json_shape(const std::vector<std::size_t>& shape) {
  Json json = Json::array();
  for (const std::size_t d : shape) json.push_back(d);
  return json;
}

Json json_place(const audit::Place& place) {
  Json json;
  json["b"] = place.sequence;
  json["h"] = place.head;
  json[place.of_keys ? "j" : "i"] = place.row;
  if (place.has_column) json["d"] = place.column;
  if (place.padding) json["padding"] = true;
  if (place.tile >= 0) {
    json["tile"] = place.tile;
    json["tile_axis"] =
        std::string(place.backward_tile ? "backward" : "forward") + (place.of_keys ? " n" : " m");
  }
  return json;
}

}  // namespace bitattn::cli
