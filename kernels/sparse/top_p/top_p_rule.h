// The parts of the pruner `top_p` (top_p_pruner.h) that CPU and GPU share: which rows and tokens it
// prunes, and its rounding. Thread-safe.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

// Relative margin of `need`: more than the rounding of float32 weights and of float64 sums.
inline constexpr double kTopPRounding = 1e-6;

// On the GPU, rows that attend to more tokens are left unchanged.
inline constexpr int64_t kMostTokens = int64_t{1} << 21;

KVASIR_HOST_DEVICE inline bool IsPruned(const SelectionHeader& header, const QueryTile& tile,
                                        const PolicyNumbers& numbers) {
  return header.kind == SelectionHeader::Kind::kList && header.count > 0 && tile.num_rows == 1 &&
         numbers.top_p < 1;  // false for NaN
}

// Returns the tokens of an entry that compete: those between sink and window.
KVASIR_HOST_DEVICE inline uint64_t Competing(const SelectionHeader& header,
                                             const SelectionEntry& entry) {
  const int64_t start = entry.page * kPageTokens;
  return entry.chosen & TokenMask(header.sink_end - start, header.window_begin - start);
}

}  // namespace kvasir::kernels
