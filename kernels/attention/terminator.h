// Ends the reading of a row before its last page. This is the seam between attention, which reads
// pages in order (reading_order.h), and methods that watch the output meanwhile
// (kernels/sparse/art). Pages between sink and window may stay unread; those of sink and window may
// not:
//
//   read     page 0 | window | ...pages between...  stop  (unread)  | the rest of the sink
//
// An unread page is not asked for: neither its K nor its V is read, and it is not counted as
// accessed. Terminators hold no state of rows and are thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/attention/attention_state.h"
#include "kernels/attention/reading_order.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

struct AttendParams;
class Terminator;

// The pages that may stay unread of a query tile of one query.
struct Termination {
  const Terminator* terminator = nullptr;  // null: none
  int64_t patience = 0;
  // Pages that hold a token before sink_end, or from window_begin on, are always read. These bounds
  // are for rows of kind all; a row with a list has its bounds in its header.
  int64_t sink_end = 0;
  int64_t window_begin = 0;
};

// The order of skippable pages: the newest first, or the best score of the row's list first. In the
// latter order a segment is closed after every kSegmentPages pages.
enum class ReadingOrder : uint8_t { kRecency, kImportance };

// Numbers of unread pages, by the tier that holds them.
struct UnreadPages {
  int32_t device = 0;
  int32_t host = 0;
};

// The output of one query head over some of the row's pages.
struct PartialOutput {
  AttentionState state;
  const float* out = nullptr;  // [head_dim], un-normalised
};

// Sums so far of the heads of a row: the closed segments, and the open one.
struct RowProgress {
  std::span<const PartialOutput> closed;  // [group]
  std::span<const PartialOutput> open;    // [group]
};

// One (query tile, KV head) whose pages are about to be read.
struct TerminatedRow {
  const AttendParams& params;
  const QueryTile& tile;
  const SelectionHeader& header;
  int64_t kv_head = 0;
  int64_t patience = 0;
  int64_t num_steps = 0;                // steps from the window on, before the rest of the sink
  std::span<const PageStep> skippable;  // the last ones of these steps
};

// A terminator's work on one row.
class RowTerminator {
 public:
  // Called after a step was added, except page 0 and the rest of the sink; skippable[next] would be
  // next. True: that page and all later skippable ones are not needed.
  virtual bool Settles(const RowProgress& progress, int64_t next) = 0;
  // Returns whether Settles may return true after one more step, skippable[next - 1]. If so,
  // prefetching the pages after it is no use.
  virtual bool MaySettle(int64_t next) const = 0;

 protected:
  ~RowTerminator() = default;
};

class Terminator {
 public:
  virtual ~Terminator() = default;
  virtual ReadingOrder order() const = 0;
  // Returns the memory for a row of `group` query heads with up to `skippable` skippable pages.
  virtual int64_t RowBytes(int64_t group, int64_t head_dim, int64_t skippable) const = 0;
  // Lays out its state in `memory` (RowBytes, 64-byte aligned), which needs no destruction. Returns
  // null when the row is too short to gain. The references of `row` outlive the result.
  virtual RowTerminator* Begin(const TerminatedRow& row, std::byte* memory) const = 0;
};

}  // namespace kvasir::kernels
