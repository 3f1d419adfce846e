#include "backends/recorded.hpp"

#include "datasets/error.hpp"

namespace bitattn {

namespace {

class RecordedBackend final : public Backend {
 public:
  std::string name() const override { return "recorded"; }
  Result run(const Capture& capture, const RunOptions& /*options*/) const override {
    if (!capture.has_recorded()) throw InputError(capture.name + ": holds no recorded outputs");
    Result result = capture.recorded;
    result.backend = name();
    return result;
  }
};

}  // namespace

std::unique_ptr<Backend> recorded_backend() {
  return std::make_unique<RecordedBackend>();
}

}  // namespace bitattn
