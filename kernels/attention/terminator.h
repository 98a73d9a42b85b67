// What ends the reading of a row before its last page: the seam between attention, which reads
// pages in order (reading_order.h), and the methods that watch the output while it does
// (kernels/sparse/art). Pages between sink and window may stay unread; sink and window never do:
//
//   read     page 0 | window | ...pages between...  stop  (unread)  | the rest of the sink
//
// A page that stays unread is not asked for: neither its K nor its V is read, and it is no access.
// Terminators hold no state of rows and are thread-compatible.
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

// What may stay unread of a query block of one query.
struct Termination {
  const Terminator* terminator = nullptr;  // null: nothing
  int64_t patience = 0;
  // Pages that hold a token before sink_end, or from window_begin on, are read. A row that lists
  // has them in its header; these are for kind all.
  int64_t sink_end = 0;
  int64_t window_begin = 0;
};

// In which order skippable pages are read: the newest first, or the one of the best score in the
// row's list. Sums of the latter are closed after every kSegmentPages of them.
enum class ReadingOrder : uint8_t { kRecency, kImportance };

// What was left unread, in pages by the tier that holds them.
struct UnreadPages {
  int32_t device = 0;
  int32_t host = 0;
};

// The output of one query head over some of the row's pages.
struct PartialOutput {
  AttentionState state;
  const float* out = nullptr;  // [head_dim], un-normalised
};

// What of the heads of a row has been added up: closed segments, and the one that is open.
struct RowProgress {
  std::span<const PartialOutput> closed;  // [group]
  std::span<const PartialOutput> open;    // [group]
};

// One (query block, KV head), whose pages are about to be read.
struct TerminatedRow {
  const AttendParams& params;
  const QueryBlock& block;
  const SelectionHeader& header;
  int64_t kv_head = 0;
  int64_t patience = 0;
  int64_t num_steps = 0;                // from the window on, before the rest of the sink
  std::span<const PageStep> skippable;  // the last of them
};

// A terminator at work on one row.
class RowTerminator {
 public:
  // A step was added; skippable[next] would be the next one. True: it and those behind it are not
  // needed. Called for every step but page 0, and the rest of the sink.
  virtual bool Settles(const RowProgress& progress, int64_t next) = 0;
  // Whether Settles may say so after one more step, skippable[next - 1], so that it is no use to
  // fetch what follows.
  virtual bool MaySettle(int64_t next) const = 0;

 protected:
  ~RowTerminator() = default;
};

class Terminator {
 public:
  virtual ~Terminator() = default;
  virtual ReadingOrder order() const = 0;
  // Memory for a row of `group` query heads with up to so many skippable pages.
  virtual int64_t RowBytes(int64_t group, int64_t head_dim, int64_t skippable) const = 0;
  // Lays out its state in `memory` (RowBytes, 64-byte aligned), which needs no destruction. Null:
  // the row is too short to gain. What `row` refers to outlives the result.
  virtual RowTerminator* Begin(const TerminatedRow& row, std::byte* memory) const = 0;
};

}  // namespace kvasir::kernels
