#pragma once
// What the build puts into the program: the page's template and where the program comes from.

namespace bitattn::cli::page {

extern const char* const
    kTemplate;  ///< page.html, with places {{generator}}, {{title}}, {{content}} in this order
extern const char* const kVersion;  ///< "0.1.0"
extern const char* const
    kCommit;  ///< of the source's git repository, "+" behind it where files were changed; "" without one

}  // namespace bitattn::cli::page
