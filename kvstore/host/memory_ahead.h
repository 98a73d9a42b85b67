// Takes memory of the host tier from the system before a block needs it, on a thread of its own.
// Zeroing a fresh huge page takes longer than a block takes to come from a peer, and on a virtual
// machine several times as long, in which no request of the worker would go on. Extents are taken
// in the order in which a slab gives those that were never used. Used by the store; called by one
// thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvstore/host/host_memory.h"
#include "proto/process/work_thread.h"

namespace kvasir::kvstore {

class MemoryAhead {
 public:
  static constexpr int64_t kLeastBytes = int64_t{64} << 20;

  // `memory`, of `num_extents` extents, outlives it and is not fitted again meanwhile. A failure is
  // told to whoever takes the extent and reserves it again.
  MemoryAhead(HostMemory& memory, int64_t num_extents)
      : memory_(memory),
        num_extents_(num_extents),
        thread_("memory", [this](int64_t extent) { memory_.Reserve(extent).IgnoreError(); }) {}

  // An extent was taken. If none above it was, there will be memory for as many more as were taken,
  // and at least for kLeastBytes, so that the tier has at most twice what blocks have filled.
  void OnTaken(int64_t extent) {
    const int64_t taken = extent + 1;
    const int64_t ahead = std::max(taken, kLeastBytes / memory_.extent_bytes());
    const int64_t end = std::min(taken + ahead, num_extents_);
    for (asked_ = std::max(asked_, taken); asked_ < end; ++asked_) thread_.Add(asked_);
  }

 private:
  HostMemory& memory_;
  const int64_t num_extents_;
  int64_t asked_ = 0;  // extents below it are reserved, or will be
  proto::WorkThread<int64_t> thread_;
};

}  // namespace kvasir::kvstore
