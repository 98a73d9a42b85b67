// The stages of policies by their names (methods.cc). Built once from the server's configuration
// and shared by all rows that name them; a row's numbers come with the row (SelectionNumbers).
// Thread-safe.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/methods.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT, listing the names there are, for an unknown name, and for options that the
// method does not have.
absl::StatusOr<std::unique_ptr<Selector>> MakeSelector(absl::string_view name,
                                                       const MethodOptions& options = {});

absl::StatusOr<std::unique_ptr<Pruner>> MakePruner(absl::string_view name);

absl::StatusOr<std::unique_ptr<ReuseRule>> MakeReuseRule(absl::string_view name);

absl::StatusOr<std::unique_ptr<Terminator>> MakeTerminator(absl::string_view name,
                                                           const MethodOptions& options = {});

}  // namespace kvasir::kernels
