// The list of sparse methods. A new method needs a folder, its header and its name in methods.cc,
// and a field in sparsity.proto for policies (docs/sparse_methods.md, "Adding a method").
// Thread-safe.
#pragma once

#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/attention/terminator.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

struct SelectorMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-selector flag
  // INVALID_ARGUMENT, listing what is valid, for an option or a value that the method does not
  // have.
  absl::StatusOr<std::unique_ptr<Selector>> (*make)(const MethodOptions& options);
};

struct PrunerMethod {
  absl::string_view name;  // as in sparsity.proto
  std::unique_ptr<Pruner> (*make)();
};

struct ReuseMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-reuse flag
  std::unique_ptr<ReuseRule> (*make)();
};

struct TerminatorMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-terminate flag
  // The same contract as SelectorMethod::make.
  absl::StatusOr<std::unique_ptr<Terminator>> (*make)(const MethodOptions& options);
};

std::span<const SelectorMethod> SelectorMethods();
std::span<const PrunerMethod> PrunerMethods();
std::span<const ReuseMethod> ReuseMethods();
std::span<const TerminatorMethod> TerminatorMethods();

}  // namespace kvasir::kernels
