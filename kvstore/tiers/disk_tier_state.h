// The state that the disk tier's three sides share: the queue that the engine's thread sees
// (disk_tier.cc), the thread that writes and the thread that reads. One mutex guards the requests
// that wait, the table of blocks, the events that nobody has polled, and the counters. Nobody waits
// for the disk while it is held, nor for the mutex of the segments, which is held over I/O. Used by
// these three alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/format/head_extent.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/disk_tier.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/segment_files.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

// Returns the path of the file that is held while the store in the directory is open.
inline std::string LockPath(const std::string& directory) { return directory + "/LOCK"; }

struct DiskTierState {
  DiskTierState(DiskTierOptions options, const ExtentFormat& format, std::optional<HeadExtent> part,
                std::unique_ptr<File> lock);

  double SecondsSince(std::chrono::steady_clock::time_point begin) const {
    return std::chrono::duration<double>(options.now() - begin).count();
  }
  // Forgets the block at once; its record and its space are freed soon after, by the writer.
  void Forget(const PrefixHash& hash) REQUIRES(mu);
  // Ends one request.
  void Complete(TierCompletion completion) REQUIRES(mu);

  const DiskTierOptions options;
  const ExtentFormat format;             // of the store
  const std::optional<HeadExtent> part;  // of larger extents; none: they are those of the store
  const std::unique_ptr<File> lock;
  SegmentFiles segments;

  mutable kernels::Mutex mu;
  kernels::CondVar wake_writer;
  kernels::CondVar wake_reader;
  kernels::CondVar happened;
  ExtentTable table GUARDED_BY(mu);
  std::deque<TierWrite> writes GUARDED_BY(mu);
  std::deque<TierRead> reads GUARDED_BY(mu);
  std::deque<TierErase> erases GUARDED_BY(mu);
  std::vector<ExtentTable::Removal> removals GUARDED_BY(mu);
  int64_t under_way GUARDED_BY(mu) = 0;  // requests without a completion
  TierEvents events GUARDED_BY(mu);
  TierStats stats GUARDED_BY(mu);
  std::chrono::steady_clock::time_point retry_at GUARDED_BY(mu);
  bool stop GUARDED_BY(mu) = false;
};

}  // namespace kvasir::kvstore
