// Takes memory of the host tier from the system before a block needs it, on a thread of its own.
// Zeroing a fresh huge page takes longer than a block takes to come from a peer, and on a virtual
// machine several times as long, in which no request of the worker would go on. Extents are taken
// in the order in which a slab gives those that were never used. A block whose bytes come from
// elsewhere waits for its extent here; one that a step computes takes it itself. Used by the store;
// called by one thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kvstore/host/host_memory.h"
#include "proto/process/work_thread.h"

namespace kvasir::kvstore {

class MemoryAhead {
 public:
  static constexpr int64_t kLeastBytes = int64_t{64} << 20;

  // `memory`, of `num_extents` extents, outlives it and is not fitted again meanwhile.
  MemoryAhead(HostMemory& memory, int64_t num_extents)
      : memory_(memory), num_extents_(num_extents), thread_("memory", [this](int64_t extent) {
          if (!memory_.Reserve(extent).ok()) has_failed_ = true;
        }) {}

  // An extent was taken, and will have memory. If none above it was, there will be memory for as
  // many more as were taken, and at least for kLeastBytes, so that the tier has at most twice what
  // blocks have filled.
  void OnTaken(int64_t extent) {
    const int64_t taken = extent + 1;
    const int64_t ahead = std::max(taken, kLeastBytes / memory_.extent_bytes());
    const int64_t end = std::min(taken + ahead, num_extents_);
    for (asked_ = std::max(asked_, extent); asked_ < end; ++asked_) thread_.Add(asked_);
  }
  // Whether there was no memory for an extent, once: whoever takes one reserves it again to know.
  bool has_failed() const { return has_failed_; }

 private:
  HostMemory& memory_;
  const int64_t num_extents_;
  int64_t asked_ = 0;  // extents below it are reserved, or will be
  std::atomic<bool> has_failed_ = false;
  proto::WorkThread<int64_t> thread_;
};

}  // namespace kvasir::kvstore
