// The ranks of a tensor-parallel group, as selections of layer scope use them
// (kernels/sparse/common/stages.h): values of all ranks are gathered and added in rank order on
// every rank. Ranks that hold the same KV heads count once. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/stages.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

class CollectiveRanks final : public kernels::LayerRanks {
 public:
  // Both outlive it.
  CollectiveRanks(const ShardPlan& shard, Collective& collective)
      : shard_(shard), collective_(collective) {}

  absl::Status Sum(std::span<int64_t> values) override;
  absl::Status Max(std::span<float> values) override;
  absl::StatusOr<std::span<const double>> Gather(std::span<const double> own) override;

 private:
  // Gathers `bytes` of every rank, in rank order, into gathered_.
  absl::Status GatherBytes(const void* own, size_t bytes);
  // Calls use(values) for each rank that counts, in order.
  template <typename T, typename Use>
  void ForEachRank(size_t count, const Use& use) const;

  const ShardPlan& shard_;
  Collective& collective_;
  std::vector<std::byte> gathered_;
  std::vector<double> of_layer_;
};

}  // namespace kvasir::worker
