// What every selector does the same way: the checks of Select and the row's header. Called by the
// selectors only. Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// Shapes, query blocks and numbers of a Select call; `selector` opens the message.
absl::Status CheckSelect(absl::string_view selector, const SelectParams& params,
                         const PageSelection& out);

// The header of a list without entries: sink and window as stages.h draws them; kAll where rule R2
// says so.
SelectionHeader MakeHeader(const QueryBlock& block, const SelectionNumbers& numbers);

// The header of a row that attends to everything.
SelectionHeader MakeAllHeader(const QueryBlock& block);

}  // namespace kvasir::kernels
