# cmake -DTEMPLATE=page.html -DSOURCE=<source tree> -DVERSION=… -DOUTPUT=build.cpp -P embed.cmake: writes the page's template
# and the commit into a source file, which is only touched where something changed.
file(READ ${TEMPLATE} template)
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty=+ --exclude=* --abbrev=10
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
string(CONFIGURE [==[// Written by cli/page/embed.cmake.
#include "cli/page/build.hpp"

namespace bitattn::cli::page {

const char* const kTemplate = R"page(@template@)page";
const char* const kVersion = "@VERSION@";
const char* const kCommit = "@commit@";

}  // namespace bitattn::cli::page
]==] text @ONLY)
set(before "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT text STREQUAL before)
  file(WRITE ${OUTPUT} "${text}")
endif()
