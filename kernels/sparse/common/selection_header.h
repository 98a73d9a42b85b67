// The part of a selection that needs no key: the row's header (stages.h) and the pages that hold
// its candidates. Shared by CPU and GPU. Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Number of pages, or token blocks, that cover `tokens`.
KVASIR_HOST_DEVICE constexpr int64_t CeilPages(int64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

// Returns the header of a row that attends to everything.
KVASIR_HOST_DEVICE inline SelectionHeader MakeAllHeader(const QueryTile& tile) {
  return {.kind = SelectionHeader::Kind::kAll,
          .query_position = tile.first_position,
          .made_at = tile.first_position};
}

// Returns the header of a list without entries, with sink and window as stages.h defines them; kAll
// where rule R2 holds.
KVASIR_HOST_DEVICE inline SelectionHeader MakeHeader(const QueryTile& tile,
                                                     const PolicyNumbers& numbers) {
  const int64_t context = tile.first_position + tile.num_rows;
  if (context <= numbers.sink_tokens + numbers.window_tokens + numbers.budget_tokens) {
    return MakeAllHeader(tile);
  }
  const int64_t window_begin =
      std::max<int64_t>(0, tile.first_position - numbers.window_tokens + 1);
  return {.kind = SelectionHeader::Kind::kList,
          .count = 0,
          .sink_end = std::min(numbers.sink_tokens, window_begin),
          .window_begin = window_begin,
          .query_position = tile.first_position,
          .made_at = tile.first_position};
}

// Number of candidates: the tokens [sink_end, window_begin + reach). 0 for kAll.
KVASIR_HOST_DEVICE inline int64_t NumCandidates(const SelectionHeader& header,
                                                const PolicyNumbers& numbers) {
  if (header.kind == SelectionHeader::Kind::kAll) return 0;
  return std::max<int64_t>(0, header.window_begin + numbers.reach_tokens - header.sink_end);
}

struct PageRange {
  int64_t begin = 0;
  int64_t end = 0;
  KVASIR_HOST_DEVICE int64_t size() const { return end - begin; }
};

// Returns the pages that hold candidates.
KVASIR_HOST_DEVICE inline PageRange CandidatePages(const SelectionHeader& header,
                                                   const PolicyNumbers& numbers) {
  const int64_t count = NumCandidates(header, numbers);
  if (count == 0) return {};
  return {.begin = header.sink_end / kPageTokens, .end = CeilPages(header.sink_end + count)};
}

}  // namespace kvasir::kernels
