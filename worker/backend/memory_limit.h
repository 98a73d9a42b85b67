// Checks whether there is room for a large piece of host memory before it is taken, and how much is
// left. The limits are those of this process's control groups, versions 1 and 2, as containers have
// them. A machine's total memory is no such limit: virtual machines grow. Functions without state.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::worker {

// RESOURCE_EXHAUSTED, naming the group and `flag`, when a group of this process allows less than it
// holds plus `bytes`. OK where there is no limit. `root` is "" except in tests.
absl::Status CheckMemoryLimit(int64_t bytes, absl::string_view flag, const std::string& root = "");

// Returns the least number of bytes that those groups leave; where none has a limit, the machine's
// free memory.
int64_t HostMemoryLeft(const std::string& root = "");

}  // namespace kvasir::worker
