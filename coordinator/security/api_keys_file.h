// Parses the file of API keys (api_keys.h has its form). Function without state: thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "coordinator/security/caller.h"

namespace kvasir::coordinator {

struct ApiKeyEntry {
  std::string name;
  std::string sha256;  // 32 bytes
  std::string tenant;  // 1 to 64 letters, digits, '.', '_' and '-'
  CallerLimits limits = {};
};

// INVALID_ARGUMENT as ApiKeys::Load.
absl::StatusOr<std::vector<ApiKeyEntry>> ReadApiKeys(const std::string& path);

}  // namespace kvasir::coordinator
