// bitattn backends: the ways of computing attention, a line each.

#include "backends/backend.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

void add_backends(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command = app.add_subcommand("backends", "Lists the backends: every way of computing attention");
  add_common_options(*command, common);
  command->callback([&common, &action] {
    action = [&common] {
      if (common.json) {
        Json list = Json::array();
        for (const BackendInfo& info : backends()) {
          list.push_back({{"name", info.name}, {"description", info.description}});
        }
        print_json({{"backends", list}});
        return kHolds;
      }
      for (const BackendInfo& info : backends()) print(info.name + "\n" + wrapped(info.description, 4));
      return kHolds;
    };
  });
}

}  // namespace bitattn::cli
