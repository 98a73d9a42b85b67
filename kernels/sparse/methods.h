// The list of sparse methods: one line each in methods.cc. A new method is a folder, a line there,
// and a field in sparsity.proto. Thread-safe.
#pragma once

#include <memory>
#include <span>

#include "absl/strings/string_view.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

struct SelectorMethod {
  absl::string_view name;  // as in sparsity.proto and the --sparse-selector flag
  std::unique_ptr<Selector> (*make)();
};

std::span<const SelectorMethod> SelectorMethods();

}  // namespace kvasir::kernels
