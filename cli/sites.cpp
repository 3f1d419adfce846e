// bitattn sites: the rounding sites, a line each.

#include "emu/profile/sites.hpp"

#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/table.hpp"

namespace bitattn::cli {

namespace {

bool is_forward(profile::Site site) {
  return site <= profile::Site::o_cast;
}

int list_sites(const CommonOptions& common) {
  if (common.json) {
    Json list = Json::array();
    for (const profile::SiteInfo& info : profile::kSites) {
      list.push_back({{"name", info.name},
                      {"pass", is_forward(info.site) ? "forward" : "backward"},
                      {"description", info.description}});
    }
    print_json({{"sites", list}});
    return kHolds;
  }
  constexpr int kNameWidth = 20;
  for (const bool forward : {true, false}) {
    print(forward ? "forward\n" : "backward\n");
    for (const profile::SiteInfo& info : profile::kSites) {
      if (is_forward(info.site) != forward) continue;
      std::string lines = wrapped(std::string(info.description), kNameWidth);
      print(lines.replace(0, info.name.size(), info.name));
    }
    print("\n");
  }
  print(wrapped("In program order. A backend runs some of them exactly: fa3+exact:o_cast,ds_cast.", 0));
  return kHolds;
}

}  // namespace

void add_sites(CLI::App& app, CommonOptions& common, Action& action) {
  CLI::App* command =
      app.add_subcommand("sites", "Lists the rounding sites: every place where a kernel rounds a value");
  add_common_options(*command, common);
  command->callback([&common, &action] { action = [&common] { return list_sites(common); }; });
}

}  // namespace bitattn::cli
