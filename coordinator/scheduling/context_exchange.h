// Blocks of contexts whose bytes leave the ranks, or come to them, one after the other from the
// beginning of a context on. An exchange holds its blocks until it ends, or its context is erased.
// What was imported is then a cached block like any other.
//
// Part of the scheduler; nobody else sees it. Thread-compatible. The references outlive it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "coordinator/scheduling/block_budget.h"
#include "coordinator/scheduling/context_blocks.h"
#include "coordinator/scheduling/plan_builder.h"
#include "coordinator/scheduling/scheduler_options.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

class ContextExchange {
 public:
  // Told once, on the scheduler's thread.
  using OnExported = std::function<void(const absl::StatusOr<std::vector<v1::HeadExtent>>& heads)>;
  using OnImported = std::function<void(const absl::Status& status)>;

  ContextExchange(const SchedulerOptions& options, BlockBudget& budget,
                  const ContextBlocks& contexts)
      : options_(options), budget_(budget), contexts_(contexts) {}
  ~ContextExchange() { GiveUp(); }

  // Begins to exchange the chain's blocks. Returns the number of them that are in memory, from the
  // beginning on; these are held.
  int64_t Begin(const ContextChain& chain);
  // Drops imports that no rank was told of. They, and further calls, are answered with ABORTED.
  void End(int64_t context);
  // Gives the parts of all KV heads of a held block. REQUIRES: `index` is below what Begin
  // returned.
  void Export(int64_t context, int64_t index, OnExported done);
  // Makes the block after those that are held. RESOURCE_EXHAUSTED without room beside the longest
  // sequence and pins; else the ranks' errors.
  void Import(int64_t context, std::vector<v1::HeadExtent> heads, OnImported done);

  void AddTo(PlanBuilder& plan);
  // Takes what a rank answers.
  void OnExportedBy(const v1::ExportedBlock& exported);
  void OnRestoredBy(const v1::RestoredBlock& restored);
  // Ends all exchanges, because the group is gone.
  void GiveUp();
  std::vector<kvstore::BlockId> held() const;

 private:
  struct Exchange {
    ContextChain chain;
    kvstore::PrefixHash scope;
    std::vector<kvstore::Block> blocks;
    std::vector<kvstore::PrefixHash> hashes;  // after each
  };
  struct PendingExport {
    int64_t ranks_left = 0;
    std::map<uint32_t, v1::HeadExtent> heads;  // ranks may share one
    absl::Status status;
    OnExported done;
  };
  struct PendingImport {
    int64_t context = 0;
    kvstore::Block block;
    kvstore::PrefixHash hash;
    int64_t ranks_left = 0;
    absl::Status status;
    OnImported done;
  };

  // The tokens of the exchange's block.
  static absl::Span<const int32_t> TokensOf(const Exchange& exchange, int64_t index);
  absl::StatusOr<kvstore::Block> TakeBlock() const;
  void EndImport(PendingImport import);

  const SchedulerOptions& options_;
  BlockBudget& budget_;
  const ContextBlocks& contexts_;

  std::map<int64_t, Exchange> exchanges_;  // by context
  uint64_t next_export_ = 0;
  std::map<uint64_t, PendingExport> exporting_;
  absl::flat_hash_map<kvstore::BlockId, PendingImport> importing_;
  // For the next plan.
  std::vector<v1::BlockExport> exports_;
  std::vector<v1::BlockImport> imports_;
};

}  // namespace kvasir::coordinator
