// The list of sparse methods: one line each in methods.cc. A new method is a folder, a line there,
// and a field in sparsity.proto. Thread-safe.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// What a policy fixes of a selector beside its name: fields of its message in sparsity.proto that
// are set.
struct SelectorOption {
  std::string name;
  std::string value;
};
using SelectorOptions = std::vector<SelectorOption>;

struct SelectorMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-selector flag
  // INVALID_ARGUMENT, saying what there is, for an option or a value that the method does not have.
  absl::StatusOr<std::unique_ptr<Selector>> (*make)(const SelectorOptions& options);
};

struct PrunerMethod {
  absl::string_view name;  // as in sparsity.proto
  std::unique_ptr<Pruner> (*make)();
};

struct ReuseMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-reuse flag
  std::unique_ptr<ReuseRule> (*make)();
};

std::span<const ReuseMethod> ReuseMethods();
std::span<const SelectorMethod> SelectorMethods();
std::span<const PrunerMethod> PrunerMethods();

}  // namespace kvasir::kernels
