// The chunks that a selector by stages begins with (infinitehip_selector.h): of equal length,
// starting at the end of the sink. Pure arithmetic, shared by CPU and GPU. Thread-safe.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

// Number of chunks of `chunk_tokens` that a stage keeps: enough for the larger of `keep_tokens` and
// the budget.
KVASIR_HOST_DEVICE constexpr int64_t KeptChunks(int64_t chunk_tokens, int64_t keep_tokens,
                                                int64_t budget_tokens) {
  const int64_t tokens = keep_tokens > budget_tokens ? keep_tokens : budget_tokens;
  // 32 bits: a 64-bit division is a function call.
  return static_cast<uint32_t>(tokens + chunk_tokens - 1) / static_cast<uint32_t>(chunk_tokens);
}

struct ChunkGrid {
  int64_t chunk_tokens = 0;
  int64_t overlap = 0;  // the last chunk begins at most this many tokens into the window
  int64_t keep_tokens = 0;

  // Number of chunks of a row. 0: there is nothing to choose from.
  KVASIR_HOST_DEVICE int64_t Count(const SelectionHeader& header,
                                   const PolicyNumbers& numbers) const {
    const bool can_choose = header.kind == SelectionHeader::Kind::kList &&
                            header.sink_end < header.window_begin && numbers.budget_tokens > 0;
    if (!can_choose) return 0;
    const int64_t last = header.query_position - (numbers.window_tokens - overlap);
    return static_cast<uint32_t>(last - header.sink_end) / static_cast<uint32_t>(chunk_tokens) + 1;
  }
  KVASIR_HOST_DEVICE int64_t Kept(const PolicyNumbers& numbers) const {
    return KeptChunks(chunk_tokens, keep_tokens, numbers.budget_tokens);
  }
};

}  // namespace kvasir::kernels
