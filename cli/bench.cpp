// bitattn bench: how fast this build computes here, each rate beside a named peer in the same run.

#include <fmt/format.h>

#include "backends/speed.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

Json speed_json(const Speed& speed) {
  Json engines = Json::array();
  for (const EngineSpeed& engine : speed.engines) {
    engines.push_back({{"name", engine.name},
                       {"products_per_second_per_core", engine.products_per_second},
                       {"ratio_to_scalar", engine.ratio_to_scalar}});
  }
  Json kernels = Json::array();
  for (const KernelSpeed& kernel : speed.kernels) {
    kernels.push_back({{"tokens", kernel.tokens},
                       {"products_per_second_per_core", kernel.products_per_second},
                       {"share_of_product_rate", kernel.share_of_product_rate}});
  }
  Json references = Json::array();
  for (const ReferenceSpeed& reference : speed.references) {
    references.push_back({{"tokens", reference.tokens},
                          {"seconds", reference.seconds},
                          {"plain_mpfr_seconds", reference.plain_mpfr_seconds},
                          {"ratio_to_plain_mpfr", reference.ratio_to_plain_mpfr}});
  }
  // The first level answers at once: the default engine, the longest head, the longest reference.
  const EngineSpeed& engine = speed.engines.back();
  return {{"emulator",
           {{"engine", engine.name},
            {"products_per_second_per_core", engine.products_per_second},
            {"ratio_to_scalar", engine.ratio_to_scalar},
            {"engines", engines}}},
          {"kernel",
           {{"tokens", speed.kernels.back().tokens},
            {"products_per_second_per_core", speed.kernels.back().products_per_second},
            {"share_of_product_rate", speed.kernels.back().share_of_product_rate},
            {"heads", kernels}}},
          {"reference",
           {{"tokens", speed.references.back().tokens},
            {"ratio_to_plain_mpfr", speed.references.back().ratio_to_plain_mpfr},
            {"heads", references}}}};
}

void report(const Speed& speed) {
  const auto giga = [](double rate) { return fmt::format("{:.2f} G", rate / 1e9); };
  print("EMULATOR   fused products a second and core, 128 x 128 x 128 tiles\n");
  Table engines;
  engines.column("engine", true).column("products/s").column("to scalar");
  for (const EngineSpeed& e : speed.engines) {
    engines.row({e.name, giga(e.products_per_second), fmt::format("{:.1f}", e.ratio_to_scalar)});
  }
  print(engines.text());
  print("\nKERNEL   one head, forward and backward, causal, head size 128\n");
  Table kernels;
  kernels.column("tokens").column("products/s").column("share of the bare rate");
  for (const KernelSpeed& k : speed.kernels) {
    kernels.row({grouped(static_cast<std::size_t>(k.tokens)), giga(k.products_per_second),
                 percent(k.share_of_product_rate)});
  }
  print(kernels.text());
  print("\nREFERENCE   one head, forward and backward, full, head size 128\n");
  Table references;
  references.column("tokens").column("seconds").column("every product in MPFR").column("ratio");
  for (const ReferenceSpeed& r : speed.references) {
    references.row({grouped(static_cast<std::size_t>(r.tokens)), fmt::format("{:.3f}", r.seconds),
                    fmt::format("{:.2f}", r.plain_mpfr_seconds),
                    fmt::format("{:.1f}", r.ratio_to_plain_mpfr)});
  }
  print(references.text());
  print("\n" + wrapped("Processor time of one core; every ratio is to a peer in the same run. "
                       "docs/performance.md says how "
                       "the cost grows and how to read this."));
}

}  // namespace

void add_bench(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("bench", "How fast: emulator engines, whole kernels, reference");
  add_common_options(*command, common);
  auto quick = std::make_shared<bool>(false);
  command->add_flag("--quick", *quick, "Small sizes, within a minute");
  command->callback([&common, &action, quick] {
    action = [&common, quick] {
      Progress progress(common.quiet);
      const Speed speed =
          measure_speed(*quick, [&](const std::string& what, double share) { progress.update(what, share); });
      progress.clear();
      if (common.json) {
        print_json(speed_json(speed));
      } else {
        report(speed);
      }
      return kHolds;
    };
  });
}

}  // namespace bitattn::cli
