// Whether there is room for a large piece of host memory, asked before it is taken: the limits of
// this process's control groups, versions 1 and 2, as containers have them. What a machine calls
// its total memory is no such limit: virtual machines grow. And how much is left by them, where one
// may take what there is. Functions without state.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::worker {

// RESOURCE_EXHAUSTED, naming the group and `flag`, when a group that this process is in allows less
// than what it holds and `bytes` more. OK where there is no limit. `root` is "" but in tests.
absl::Status CheckMemoryLimit(int64_t bytes, absl::string_view flag, const std::string& root = "");

// Bytes that all those groups leave; where none of them has a limit, what the machine has free.
int64_t HostMemoryLeft(const std::string& root = "");

}  // namespace kvasir::worker
