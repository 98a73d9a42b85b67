// `kvasir context ACTION`: the calls of kvasir.v1.Contexts from a terminal. Thread-compatible.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/contexts.pb.h"

namespace kvasir::coordinator {

// Names of the actions, for help and completion.
std::vector<std::string> ContextActions();

// Carries out an action of ContextActions and prints the answer. INVALID_ARGUMENT for another one.
absl::Status RunContext(absl::string_view action, const v1::ContextCommandConfig& config);

// Returns the contexts as a table for people.
std::string ContextTable(const std::vector<v1::Context>& contexts);

}  // namespace kvasir::coordinator
