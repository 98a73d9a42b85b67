// Reads the policies that a server declares besides its default: a YAML list of SparsityPolicy,
// e.g.
//
//   - name: long-answers
//     decode: {quest: {}, sink_tokens: 128, window_tokens: 512, token_budget: 1024}
//     tail_tokens: 64
//
// Called by the server at start. Pure functions: thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::coordinator {

// Returns the policies. INVALID_ARGUMENT with the place of the error for anything but such a list,
// NOT_FOUND without the file.
absl::StatusOr<std::vector<v1::SparsityPolicy>> LoadPolicyFile(const std::string& path);
absl::StatusOr<std::vector<v1::SparsityPolicy>> ParsePolicies(const std::string& yaml);

}  // namespace kvasir::coordinator
