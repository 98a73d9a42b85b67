#include "proto/process/version.h"

namespace kvasir::proto {

std::string Version() { return KVASIR_VERSION; }

}  // namespace kvasir::proto
