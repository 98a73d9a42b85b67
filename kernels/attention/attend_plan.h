// Cuts a call of AttendFast into items of work: a (query tile, KV head), or one segment of it where
// rows are few and contexts long. For attend_cpu_fast.cc. Thread-compatible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention/attend.h"
#include "kernels/attention/attention_state.h"
#include "kernels/attention/early_end.h"
#include "kernels/attention/reading_order.h"
#include "kernels/attention/tile/attend_tile.h"
#include "kernels/base/scratch.h"

namespace kvasir::kernels {

inline constexpr int64_t kWholeRow = -1;
// Work is cut into about this many items a thread, so that threads finish together.
inline constexpr int64_t kItemsPerThread = 4;
// Rows with fewer pages are not cut.
inline constexpr int64_t kMinPagesToSplit = 2 * kSegmentPages;

// The state of all query rows of a (query tile, KV head) over some segments.
struct RowStates {
  AttentionState* states = nullptr;  // [rows]
  float* out = nullptr;              // [rows, head_dim], un-normalised
};

struct AttendItem {
  int64_t row = 0;              // row of the selection
  int64_t segment = kWholeRow;  // the only segment to compute, or kWholeRow
  RowStates partial;            // destination of the segment's state
};

// A row that was cut. The states of its segments are contiguous.
struct SplitRow {
  int64_t row = 0;
  int64_t first_item = 0;
  int64_t num_items = 0;
};

// Values shared by all items.
struct AttendContext {
  const AttendParams& p;
  AddPageFn* add_page;
  bool bf16_queries;  // the tile function takes bfloat16 queries
  int64_t heads;
  int64_t group;
  int64_t head_dim;

  int64_t kv_heads() const { return p.kv.layout.num_kv_heads; }
  const QueryTile& tile(int64_t row) const {
    return p.tiles[static_cast<size_t>(row / kv_heads())];
  }
  int64_t rows(int64_t row) const { return tile(row).num_rows * group; }
  int64_t last_position(int64_t row) const {
    return tile(row).first_position + tile(row).num_rows - 1;
  }
  bool MayEndEarly(int64_t row) const {
    return !p.terminations.empty() &&
           p.terminations[static_cast<size_t>(row / kv_heads())].terminator != nullptr;
  }
  SelectedPages Walk(int64_t row) const {
    return SelectedPages(p.selection.header(row), p.selection.list(row), last_position(row));
  }
  // Row of the first query head in q, out and lse. Query i, head g is i * heads + g rows further.
  int64_t first_q_row(int64_t row) const {
    return tile(row).first_row * heads + row % kv_heads() * group;
  }
};

// The largest item of a call.
struct ItemSize {
  int64_t rows = 0;  // query rows
  int64_t pages = 0;
  int64_t ending_bytes = 0;  // memory of terminators
};

// Upper bound of the number of pages that a row attends to, without a walk over them.
inline int64_t PageBound(const AttendContext& c, int64_t row) {
  const int64_t context_pages = c.last_position(row) / kPageTokens + 1;
  const SelectionHeader& header = c.p.selection.header(row);
  if (header.kind == SelectionHeader::Kind::kAll) return context_pages;
  const int64_t sink_pages = (header.sink_end + kPageTokens - 1) / kPageTokens;
  const int64_t window_pages =
      std::max<int64_t>(0, context_pages - header.window_begin / kPageTokens);
  return std::min(context_pages, sink_pages + header.count + window_pages);
}

struct PlanSize {
  ItemSize largest;
  int64_t items = 0;
  int64_t split_rows = 0;
  int64_t partial_rows = 0;  // query rows of all segments of split rows
};

// The plan of a call, and the states of the segments of split rows.
struct PlanMemory {
  PlanMemory(ScratchPieces& pieces, const PlanSize& size, int64_t head_dim)
      : items(pieces.Take<AttendItem>(size.items)),
        split_rows(pieces.Take<SplitRow>(size.split_rows)),
        partial{.states = pieces.Take<AttentionState>(size.partial_rows),
                .out = pieces.Take<float>(size.partial_rows * head_dim)} {}

  AttendItem* items;
  SplitRow* split_rows;
  RowStates partial;
};

// Cuts the work into items.
class AttendPlanner {
 public:
  AttendPlanner(const AttendContext& c, int num_threads) : c_(c) {
    if (num_threads == 1) return;
    int64_t total_pages = 0;
    for (int64_t row = 0; row < c.p.selection.num_rows; ++row) total_pages += PageBound(c, row);
    min_pages_to_split_ = std::max(kMinPagesToSplit, total_pages / (kItemsPerThread * num_threads));
  }

  PlanSize Size() const {
    PlanSize size;
    for (int64_t row = 0; row < c_.p.selection.num_rows; ++row) {
      const int64_t item_pages = IsSplit(row) ? kSegmentPages : PageBound(c_, row);
      size.largest.rows = std::max(size.largest.rows, c_.rows(row));
      size.largest.pages = std::max(size.largest.pages, item_pages);
      if (!IsSplit(row)) {
        ++size.items;
        continue;
      }
      ++size.split_rows;
      ForEachSegment(row, [&](int64_t) {
        ++size.items;
        size.partial_rows += c_.rows(row);
      });
    }
    size.largest.ending_bytes = EarlyEnd::MemoryBytes(c_.p, size.largest.pages);
    return size;
  }

  void Fill(const PlanMemory& plan) const {
    int64_t items = 0;
    int64_t split_rows = 0;
    RowStates partial = plan.partial;
    for (int64_t row = 0; row < c_.p.selection.num_rows; ++row) {
      if (!IsSplit(row)) {
        plan.items[items++] = {.row = row, .segment = kWholeRow, .partial = {}};
        continue;
      }
      const int64_t first_item = items;
      ForEachSegment(row, [&](int64_t segment) {
        plan.items[items++] = {.row = row, .segment = segment, .partial = partial};
        partial.states += c_.rows(row);
        partial.out += c_.rows(row) * c_.head_dim;
      });
      // Segment 0 is merged first, then the others from the newest on.
      const bool has_first = first_item < items && plan.items[first_item].segment == 0;
      std::reverse(plan.items + first_item + (has_first ? 1 : 0), plan.items + items);
      plan.split_rows[split_rows++] = {
          .row = row, .first_item = first_item, .num_items = items - first_item};
    }
  }

 private:
  // Tiles of many queries give enough items, and their states are large. A row that may end early
  // must be read from its start.
  bool IsSplit(int64_t row) const {
    return c_.tile(row).num_rows == 1 && !c_.MayEndEarly(row) &&
           PageBound(c_, row) >= min_pages_to_split_;
  }
  // Calls use(segment) for the segments that hold attended tokens, ascending.
  template <typename Use>
  void ForEachSegment(int64_t row, const Use& use) const {
    for (SelectedPages walk = c_.Walk(row); walk.valid();) {
      const int64_t segment = SegmentOf(walk.page());
      use(segment);
      walk.SkipTo(FirstPageOf(segment + 1));
    }
  }

  const AttendContext& c_;
  int64_t min_pages_to_split_ = std::numeric_limits<int64_t>::max();
};

}  // namespace kvasir::kernels
