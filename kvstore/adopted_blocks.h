// Sealed blocks that an earlier store left in the host memory (host/host_memory.h): of this
// process or of one that was killed. Found by their headers alone, offered by their hashes like
// blocks of the tier below, and verified on a thread of its own before anything of them is used.
// They lie in extents that the store does not need yet. Made and called by the KV store.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

#include "kernels/base/mutex.h"
#include "kvstore/format/page_format.h"
#include "kvstore/host/host_memory.h"
#include "kvstore/host/host_slab.h"
#include "kvstore/tiers/tier.h"
#include "proto/process/work_thread.h"

namespace kvasir::kvstore {

// Counters since the store was made.
struct AdoptionStats {
  int64_t found = 0;    // whole headers, at the start
  int64_t used = 0;     // verified, and part of a sequence since
  int64_t torn = 0;     // a header that is damaged: dropped at the start
  int64_t damaged = 0;  // other bytes than were sealed: dropped when asked for
  int64_t evicted = 0;  // dropped for the room
};

class AdoptedBlocks {
 public:
  // Takes the extents with sealed blocks, before any is taken. The references outlive it.
  AdoptedBlocks(const ExtentFormat& format, const HostMemory& memory, HostSlab& host);

  bool Holds(const PrefixHash& hash) const { return by_hash_.contains(hash); }
  int64_t size() const { return static_cast<int64_t>(by_hash_.size()); }
  std::vector<StoredBlock> Inventory() const;
  // Above the generations of all blocks.
  uint64_t next_generation() const { return next_generation_; }
  const AdoptionStats& stats() const { return stats_; }

  // Frees the extent of the block that was sealed first, and returns its hash. None: there is none.
  std::optional<PrefixHash> EvictOne();
  // Frees the block's extent, if there is such a block.
  bool Drop(const PrefixHash& hash);
  // Drops the blocks that the order covers. Returns their hashes.
  std::vector<PrefixHash> DropCovered(const TierErase& order);
  // Takes an extent back that was verified and not used, and returns its block. None: another
  // extent has the same block, and this one is free.
  std::optional<BlockIdentity> TakeBack(int64_t extent);
  void CountUse() { ++stats_.used; }

  // Gives the block's extent away, and begins to verify it. REQUIRES: Holds(hash).
  int64_t BeginVerify(const PrefixHash& hash) EXCLUDES(mu_);
  struct Verified {
    int64_t extent = 0;
    BlockIdentity block;
    absl::Status status;  // DATA_LOSS: what is not as it was sealed
  };
  std::vector<Verified> TakeVerified() EXCLUDES(mu_);
  // Number of blocks that were given away and not taken yet.
  int64_t num_verifying() const { return num_verifying_; }
  // Waits until they all can be taken.
  void AwaitVerified() EXCLUDES(mu_);

 private:
  struct Adopted {
    int64_t extent = 0;
    BlockIdentity block;
  };

  bool Adopt(int64_t extent);
  void Verify(const Adopted& adopted) EXCLUDES(mu_);
  Adopted Remove(const PrefixHash& hash);

  const ExtentFormat& format_;
  HostSlab& host_;
  absl::flat_hash_map<PrefixHash, Adopted> by_hash_;
  // By age. Blocks of a peer have its generations.
  std::set<std::pair<uint64_t, PrefixHash>> by_generation_;
  uint64_t next_generation_ = 0;
  AdoptionStats stats_;
  int64_t num_verifying_ = 0;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::vector<Verified> verified_ GUARDED_BY(mu_);

  proto::WorkThread<Adopted> verifier_;  // last, as it uses everything above
};

}  // namespace kvasir::kvstore
