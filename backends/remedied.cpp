#include "backends/remedied.hpp"

#include <algorithm>

#include "backends/emulator.hpp"
#include "backends/fa3_support.hpp"
#include "backends/fp32.hpp"
#include "backends/input_remedies.hpp"
#include "backends/sites.hpp"
#include "datasets/error.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

namespace {

using profile::Remedy;
using profile::RemedySet;

/// A backend that bears a name of its own and computes a problem whose inputs were remedied before.
class Remedied final : public Backend {
 public:
  Remedied(std::string name, RemedySet remedies, RemedySet inputs, std::unique_ptr<Backend> inner)
      : name_(std::move(name)), inputs_(inputs), inner_(std::move(inner)) {
    for (const profile::RemedyInfo& i : profile::kRemedies) {
      if (remedies.has(i.remedy) && known_to_hurt(i)) {
        warnings_.push_back(std::string(i.name) + ": " + std::string(i.warning));
      }
    }
  }

  std::string name() const override { return name_; }

  Result run(const Capture& capture, const RunOptions& options) const override {
    check_remedies_fit(capture, inputs_);
    Result result;
    if (inputs_.empty()) {
      result = inner_->run(capture, options);
    } else {
      Capture remedied;
      remedied.name = capture.name;
      remedied.problem = remedy_inputs(capture.problem, inputs_);
      result = inner_->run(remedied, options);
    }
    result.backend = name_;
    result.notes.insert(result.notes.end(), warnings_.begin(), warnings_.end());
    return result;
  }

 private:
  std::string name_;
  RemedySet inputs_;
  std::unique_ptr<Backend> inner_;
  std::vector<std::string> warnings_;
};

RemedySet both(RemedySet a, const RemedySet& b) {
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    if (b.has(i.remedy)) a.add(i.remedy);
  }
  return a;
}

/// A name taken apart.
struct ParsedName {
  std::string base;
  RemedySet inputs, kernel;
  profile::SiteSet exact;
  bool changes_kernel() const { return !kernel.empty() || !exact.empty(); }
};

ParsedName parse_name(const std::string& name) {
  static constexpr std::string_view kExact = "exact:";
  ParsedName parsed;
  std::string remedied;  // the name without its exact sites
  try {
    for (std::size_t begin = 0; begin != std::string::npos;) {
      const std::size_t plus = name.find('+', begin);
      const std::string part = name.substr(begin, plus == std::string::npos ? plus : plus - begin);
      if (begin > 0 && part.starts_with(kExact)) {
        if (!parsed.exact.empty()) throw std::invalid_argument("exact: comes twice");
        parsed.exact = profile::parse_sites(std::string_view(part).substr(kExact.size()));
      } else {
        remedied += (begin > 0 ? "+" : "") + part;
      }
      begin = plus == std::string::npos ? plus : plus + 1;
    }
  } catch (const std::invalid_argument& error) {
    throw InputError("'" + name + "': " + error.what());
  }
  try {
    const profile::RemediedName found = profile::parse_remedies(remedied);
    parsed.base = found.base;
    for (const profile::RemedyInfo& i : profile::kRemedies) {
      if (found.remedies.has(i.remedy)) {
        (is_input_remedy(i.remedy) ? parsed.inputs : parsed.kernel).add(i.remedy);
      }
    }
  } catch (const std::invalid_argument& error) {
    throw InputError(error.what());
  }
  return parsed;
}

profile::Profile kernel_profile(const std::string& name, const ParsedName& parsed) {
  profile::Profile profile;
  profile.name = name;
  profile.remedies = parsed.kernel;
  profile.exact = parsed.exact;
  return profile;
}

}  // namespace

std::unique_ptr<Backend> remedied_backend(const std::string& name) {
  const ParsedName parsed = parse_name(name);
  std::unique_ptr<Backend> inner;
  if (!parsed.changes_kernel() && parsed.base != "recorded") {
    inner = make_backend(parsed.base);
  } else if (parsed.base != "fa3") {
    const std::string what =
        parsed.exact.empty() ? profile::text(both(parsed.inputs, parsed.kernel)) : "exact sites";
    throw InputError("'" + name + "': " + what + " cannot change " + parsed.base +
                     (parsed.changes_kernel() ? ", only fa3" : ", which computes nothing"));
  } else if (parsed.kernel.has(Remedy::fp32)) {
    if (!parsed.exact.empty()) throw InputError("'" + name + "': fp32 throughout has no rounding sites");
    inner = fp32_backend();
  } else {
    const profile::Profile profile = kernel_profile(name, parsed);
    inner = profile.exact.empty() ? emulator_backend(profile) : site_backend(profile);
  }
  return std::make_unique<Remedied>(name, both(parsed.inputs, parsed.kernel), parsed.inputs,
                                    std::move(inner));
}

std::optional<EmulatedKernel> emulated_kernel(const std::string& name) {
  const ParsedName parsed = parse_name(name);
  if (parsed.base != "fa3" || parsed.kernel.has(Remedy::fp32) || parsed.kernel.has(Remedy::fp32_backward)) {
    return std::nullopt;
  }
  return EmulatedKernel{kernel_profile(name, parsed), parsed.inputs};
}

std::vector<BackendInfo> with_remedies(std::vector<BackendInfo> list) {
  const auto fa3 =
      std::find_if(list.begin(), list.end(), [](const BackendInfo& info) { return info.name == "fa3"; });
  std::vector<BackendInfo> remedied;
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    std::string line(i.description);
    if (known_to_hurt(i)) line += "; warning: " + std::string(i.warning);
    remedied.push_back({"fa3+" + std::string(i.name), line});
  }
  remedied.push_back({"fa3+exact:o_cast[,SITE…]",
                      "these rounding sites run exactly (fp64); all: every one (bitattn sites lists them)"});
  list.insert(fa3 == list.end() ? fa3 : fa3 + 1, remedied.begin(), remedied.end());
  return list;
}

}  // namespace bitattn
