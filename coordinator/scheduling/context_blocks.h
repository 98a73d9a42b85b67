// Blocks of contexts, which stay or go by wish and not by use alone: pins in the host tier and on
// disk, demotion to disk, erasing. Wishes are carried out by the next plan. The other rules of the
// cache hold: what is pinned is found, restored and lost as any block.
//
// A pin in the host tier holds the blocks, so that the index does not evict them. All pins together
// leave room for the longest sequence that may run: they delay requests and make none impossible. A
// pin on disk is told to the ranks, which evict other blocks first.
//
// Part of the scheduler; nobody else sees it. Thread-compatible. The index outlives it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "coordinator/scheduling/plan_builder.h"
#include "coordinator/scheduling/restore_book.h"
#include "coordinator/scheduling/scheduler_options.h"
#include "kvstore/index/prefix_index.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// A context's tokens, and what names their blocks.
struct ContextChain {
  int64_t context = 0;  // number of the context; no other one ever has it
  std::string tenant;
  v1::AttentionPolicy prefill;
  std::shared_ptr<const std::vector<int32_t>> tokens;

  int64_t num_blocks() const { return std::ssize(*tokens) / kBlockTokens; }
};

struct PinnedBlocks {
  int64_t granted = 0;  // at the beginning of the context
  int64_t present = 0;  // of these, in the tier by now
};

// Blocks to erase: those of a chain, those of a tenant, or all.
struct EraseTarget {
  std::shared_ptr<const ContextChain> chain = nullptr;
  std::shared_ptr<const std::string> tenant = nullptr;  // neither: all
};

class ContextBlocks {
 public:
  // Told once, on the scheduler's thread: the sums over ranks, or why they are not known.
  using OnErased = std::function<void(const absl::StatusOr<v1::Erased>& sums)>;

  // The references outlive it.
  ContextBlocks(const SchedulerOptions& options, kvstore::PrefixIndex& index,
                const RestoreBook& restores)
      : options_(options), index_(index), restores_(restores) {}
  ~ContextBlocks() { GiveUp(); }

  // Start of the chain of hashes of a tenant's blocks.
  kvstore::PrefixHash ScopeOf(const std::string& tenant, const v1::AttentionPolicy& prefill) const;

  // Finds the chain's whole blocks in memory.
  kvstore::PrefixMatch Match(const ContextChain& chain) const;

  // Pins at most `most` blocks, in place of an earlier pin of the context in this tier.
  PinnedBlocks PinHost(const ContextChain& chain, int64_t most);
  PinnedBlocks PinDisk(const ContextChain& chain, int64_t most);
  void UnpinHost(int64_t context) { host_.erase(context); }
  void UnpinDisk(int64_t context);
  // Number of the chain's blocks that are found in memory.
  int64_t CountInMemory(const ContextChain& chain) const;
  // Gives up the chain's blocks in memory, after writing them to disk; those in use stay. Returns
  // the number of blocks in memory.
  int64_t Demote(const ContextChain& chain);
  // Erases on all ranks. Pins of what is erased end.
  void Erase(const EraseTarget& target, OnErased done);

  // Calls the function while the next plan is made, after the blocks of sequences that have ended
  // are sealed and published; or with an error, when there is no next plan.
  void AtNextPlan(std::function<void(const absl::Status&)> wish) {
    wishes_.push_back(std::move(wish));
  }
  // Whether AddTo has something to add. Such a plan is not made ahead: pins take blocks that it
  // would count on.
  bool has_wishes() const;
  // Adds what is wished to the plan; before the blocks that are dropped.
  void AddTo(PlanBuilder& plan);
  // Takes a rank's answer to an erase.
  void OnErasedBy(const v1::Erased& erased);
  // Ends all pins and answers all erases, because the group is gone.
  void GiveUp();

  int64_t pinned_host_blocks() const;
  int64_t pinned_disk_blocks() const { return std::ssize(disk_counts_); }
  // Blocks that pins, and wishes, hold.
  std::vector<kvstore::BlockId> held() const;

 private:
  struct DiskWrite {
    kvstore::Block block;
    std::vector<int32_t> tokens;
  };
  struct PendingErase {
    int64_t ranks_left = 0;
    v1::Erased sums;
    OnErased done;
  };

  std::vector<kvstore::PrefixHash> HashesOf(const ContextChain& chain, int64_t count) const;
  // Writes blocks of the chain that are in memory and not on every rank's disk.
  void Write(const ContextChain& chain, const kvstore::PrefixMatch& match, int64_t count);

  const SchedulerOptions& options_;
  kvstore::PrefixIndex& index_;
  const RestoreBook& restores_;

  std::map<int64_t, std::vector<kvstore::Block>> host_;            // by context
  std::map<int64_t, std::vector<kvstore::PrefixHash>> disk_;       // by context
  absl::flat_hash_map<kvstore::PrefixHash, int64_t> disk_counts_;  // pins of each block

  // For the next plan.
  std::vector<std::function<void(const absl::Status&)>> wishes_;
  std::vector<DiskWrite> writes_;
  std::vector<kvstore::BlockId> demoted_;  // children after their parents
  std::vector<kvstore::PrefixHash> new_pins_;
  std::vector<kvstore::PrefixHash> ended_pins_;
  std::vector<v1::Erase> erases_;

  uint64_t next_erase_ = 0;
  std::map<uint64_t, PendingErase> pending_;
};

}  // namespace kvasir::coordinator
