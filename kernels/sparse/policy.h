// Builds the stages of policies from their names (methods.cc). Stages are built once from the
// server's configuration and shared by all rows that name them. A row brings its own numbers
// (PolicyNumbers). Thread-safe.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/methods.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT for an unknown name, listing the known ones, and for options that the method
// does not have.
absl::StatusOr<std::unique_ptr<Selector>> MakeSelector(absl::string_view name,
                                                       const MethodOptions& options = {});

absl::StatusOr<std::unique_ptr<Pruner>> MakePruner(absl::string_view name);

absl::StatusOr<std::unique_ptr<ReuseRule>> MakeReuseRule(absl::string_view name);

absl::StatusOr<std::unique_ptr<Terminator>> MakeTerminator(absl::string_view name,
                                                           const MethodOptions& options = {});

}  // namespace kvasir::kernels
