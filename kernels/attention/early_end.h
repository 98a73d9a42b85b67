// The early end of one row: finds the pages that its terminator may leave unread, orders them as
// the terminator wants, asks it after each page, and counts the unread ones. For the CPU
// implementations of Attend. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/attention/attend.h"

namespace kvasir::kernels {

class EarlyEnd {
 public:
  // Returns the bytes of `memory` for rows of up to `pages` pages.
  static int64_t MemoryBytes(const AttendParams& params, int64_t pages);

  // `steps` are the row's steps in the order of ListSteps, and may be reordered. They and `memory`
  // (64-byte aligned) outlive this object.
  EarlyEnd(const AttendParams& params, int64_t row, std::span<PageStep> steps, std::byte* memory);
  EarlyEnd(const EarlyEnd&) = delete;
  EarlyEnd& operator=(const EarlyEnd&) = delete;

  // True when every step is taken. Then no other function need be called.
  bool never() const { return terminator_ == nullptr; }
  // Returns whether steps[next] may turn out unneeded once the step before it has been added.
  bool MaySkip(int64_t next) const;
  // Called after a step was added. Returns the step to continue with: `next`, or the one after all
  // skipped steps.
  int64_t After(const RowProgress& progress, int64_t next);

 private:
  void FindSkippable(const Termination& termination);
  void CountUnread(int64_t begin);

  const AttendParams& params_;
  const int64_t row_;
  const std::span<PageStep> steps_;
  // steps_[first_, end_) are watched, steps_[skippable_, end_) may be skipped.
  int64_t first_ = 0;
  int64_t skippable_ = 0;
  int64_t end_ = 0;
  TerminatedRow watched_;
  RowTerminator* terminator_ = nullptr;
};

}  // namespace kvasir::kernels
