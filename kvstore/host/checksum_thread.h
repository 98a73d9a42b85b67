// Makes the checksums of extents whose pages come later than their seal, on a thread of its own: no
// step waits for them, and a block can be written, lent and adopted soon. Used by a residency
// (PageResidency::IsExtentWhole); its functions are called by one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/format/page_format.h"
#include "kvstore/host/host_slab.h"
#include "proto/process/work_thread.h"

namespace kvasir::kvstore {

class ChecksumThread {
 public:
  // `slab` outlives it.
  ChecksumThread(const ExtentFormat& format, const HostSlab& slab);
  ~ChecksumThread() { thread_.Stop(); }

  // Begins, after those before it, with the checksums of block `hash`. REQUIRES: its pages are in
  // the extent and stay until Forget, which was called if another block was there.
  void Begin(int64_t extent, const PrefixHash& hash) EXCLUDES(mu_);
  // Whether the checksums are in the extent.
  bool IsDone(int64_t extent) const EXCLUDES(mu_);
  // The extent may be another block's after the call.
  void Forget(int64_t extent) EXCLUDES(mu_);

 private:
  struct Work {
    int64_t extent = 0;
    uint64_t use = 0;  // of the extent, when the work was given
    PrefixHash hash{};
  };
  struct Use {
    uint64_t number = 0;  // counts the blocks that the extent had
    bool is_done = false;
  };
  void Run(const Work& work) EXCLUDES(mu_);

  const ExtentFormat format_;
  const HostSlab& slab_;
  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Use> uses_ GUARDED_BY(mu_);  // [extent]
  int64_t running_ GUARDED_BY(mu_) = -1;   // extent
  proto::WorkThread<Work> thread_;         // last: it uses everything above
};

}  // namespace kvasir::kvstore
