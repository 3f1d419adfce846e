#pragma once
// What goes to standard output and standard error, and how numbers look there.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "audit/place.hpp"

namespace bitattn::cli {

using Json = nlohmann::ordered_json;

/// Text on standard output.
void print(const std::string& text);
/// One JSON object on standard output.
void print_json(const Json& object);
/// A line "bitattn: …" on standard error.
void warn(const std::string& text);
/// Flushes standard output; throws InputError where it could not be written. Returns `code`.
int finish_output(int code);

/// Control characters and line ends replaced, so that it stays one line.
std::string one_line(const std::string& text);

/// Two significant digits, "0" for zero, "-" for what is not defined.
std::string brief_number(double x);
/// Six significant digits.
std::string plain_number(double x);
/// 1,234,567
std::string grouped(std::size_t n);
/// "1 row", "2 rows"
std::string counted(std::size_t n, const std::string& noun);
/// "1.5 GiB"
std::string bytes_text(double bytes);
/// A share as "0.12%", "25%".
std::string percent(double share);

/// Two digits, always in the form of the tables in docs/spec/measured-facts.md; "-" for what is not defined.
std::string figure(double x);

/// The value at a JSON pointer, null where there is none.
const Json& at(const Json& json, const std::string& pointer);
/// The number there; NaN where it is null or absent.
double number_at(const Json& json, const std::string& pointer);

/// null for what is not finite.
Json json_number(double x);
Json json_shape(const std::vector<std::size_t>& shape);
Json json_place(const audit::Place& place);

}  // namespace bitattn::cli
