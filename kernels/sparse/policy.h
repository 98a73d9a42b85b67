// The shape of a policy for one phase (prefill or decode): which stages run. Built once from the
// server's configuration and shared by all rows that name it; a row's numbers come with the row
// (SelectionNumbers). Thread-compatible.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

struct Policy {
  std::unique_ptr<Selector> selector;
  std::unique_ptr<Pruner> pruner;    // null: nothing is pruned
  std::unique_ptr<ReuseRule> reuse;  // null: every step selects anew
};

// INVALID_ARGUMENT, listing the names there are, for an unknown name.
absl::StatusOr<std::unique_ptr<Selector>> MakeSelector(absl::string_view name);

}  // namespace kvasir::kernels
