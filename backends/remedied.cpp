#include "backends/remedied.hpp"

#include <algorithm>

#include "backends/emulator.hpp"
#include "backends/fa3_support.hpp"
#include "backends/fp32.hpp"
#include "backends/input_remedies.hpp"
#include "datasets/error.hpp"
#include "emu/profile/profile.hpp"

namespace bitattn {

namespace {

using profile::Remedy;
using profile::RemedySet;

/// Makes some captures worse than the plain kernel (docs/findings.md, 5), so whoever runs it is told where.
bool known_to_hurt(const profile::RemedyInfo& remedy) {
  return remedy.experimental || remedy.remedy == Remedy::gproj || remedy.remedy == Remedy::shifted_max;
}

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

}  // namespace

std::unique_ptr<Backend> remedied_backend(const std::string& name) {
  profile::RemediedName parsed;
  try {
    parsed = profile::parse_remedies(name);
  } catch (const std::invalid_argument& error) {
    throw InputError(error.what());
  }
  RemedySet inputs;
  RemedySet kernel;
  for (const profile::RemedyInfo& i : profile::kRemedies) {
    if (parsed.remedies.has(i.remedy)) (is_input_remedy(i.remedy) ? inputs : kernel).add(i.remedy);
  }
  std::unique_ptr<Backend> inner;
  if (kernel.empty() && parsed.base != "recorded") {
    inner = make_backend(parsed.base);
  } else if (parsed.base != "fa3") {
    throw InputError("'" + name + "': " + profile::text(parsed.remedies) + " cannot change " + parsed.base +
                     (kernel.empty() ? ", which computes nothing" : ", only fa3"));
  } else if (kernel.has(Remedy::fp32)) {
    inner = fp32_backend();
  } else {
    profile::Profile profile;
    profile.name = name;
    profile.remedies = kernel;
    inner = emulator_backend(profile);
  }
  return std::make_unique<Remedied>(name, parsed.remedies, inputs, std::move(inner));
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
  list.insert(fa3 == list.end() ? fa3 : fa3 + 1, remedied.begin(), remedied.end());
  return list;
}

}  // namespace bitattn
