// The early end of one row: finds the pages that its terminator may leave unread, orders them as it
// wants, asks it after each page, and counts what was left. For the CPU implementations of Attend.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/attention/attend.h"

namespace kvasir::kernels {

class EarlyEnd {
 public:
  // Bytes of `memory` for rows of up to `pages` pages.
  static int64_t MemoryBytes(const AttendParams& params, int64_t pages);

  // `steps` are those of the row, in the order of ListSteps, and may be put in another. They and
  // `memory` (64-byte aligned) outlive this object.
  EarlyEnd(const AttendParams& params, int64_t row, std::span<PageStep> steps, std::byte* memory);
  EarlyEnd(const EarlyEnd&) = delete;
  EarlyEnd& operator=(const EarlyEnd&) = delete;

  // Every step is taken, and no other function need be called.
  bool never() const { return terminator_ == nullptr; }
  // Before a step is added that is followed by steps[next]: whether that may turn out unneeded.
  bool MaySkip(int64_t next) const;
  // After a step was added: the step to go on with, steps[next] or the one behind all that are
  // skipped.
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
