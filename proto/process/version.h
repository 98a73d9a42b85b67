// The release that this program is of, as --version, GetServerInfo and kvasir_build_info say it.
// Thread-safe.
#pragma once

#include <string>

namespace kvasir::proto {

std::string Version();

}  // namespace kvasir::proto
