// The part of a model that one rank of a tensor-parallel group owns. Attention is split by KV head,
// each with its query heads; the MLP by intermediate columns; the output head by vocabulary. Used
// by weights.h, the attention layer and the sampler. A value and a function without state.
//
//   tp <= Hkv   rank r: KV heads [r*Hkv/tp, (r+1)*Hkv/tp) and all query heads of theirs
//   tp >  Hkv   KV head r/(tp/Hkv) lies on tp/Hkv ranks, which split its query heads among them;
//               each has the head's whole K and V, selections are made from all its query heads,
//               and counts per KV head are reported by the lowest of these ranks
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "worker/checkpoint/model_config.h"

namespace kvasir::worker {

struct IndexRange {
  int64_t begin = 0, end = 0;  // [begin, end)

  int64_t size() const { return end - begin; }
};

struct ShardPlan {
  int64_t rank = 0;
  int64_t num_ranks = 1;
  IndexRange kv_heads;              // global indices
  IndexRange query_heads;           // global indices
  IndexRange intermediate;          // columns of the MLP; not the same number on every rank
  IndexRange vocab;                 // rows of the output head; the last rank may have fewer
  int64_t vocab_rows_per_rank = 0;  // of every rank except the last: vocab.begin / rank
  int64_t kv_replicas = 1;          // ranks that hold this rank's KV head; 1 unless tp > Hkv

  // Index of this rank among the ranks of its KV head; 0 for the lowest.
  int64_t replica() const { return rank % kv_replicas; }

  // INVALID_ARGUMENT when the model does not divide over `num_ranks`, naming the numbers that do
  // not.
  static absl::StatusOr<ShardPlan> Make(const ModelConfig& config, int64_t rank, int64_t num_ranks);
};

}  // namespace kvasir::worker
