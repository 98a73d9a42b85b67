// The attention half of a decoder layer: projections, rotary embedding, KV append, selection by
// each row's policy, attention over pages, output projection. One path for dense and sparse, for
// prefill and decode. It holds the layer's packed weights; memory and tables of the step are lent.
// Called by the transformer. Thread-compatible.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/executor.h"
#include "kernels/dense/gemm.h"
#include "kernels/dense/rope.h"
#include "kernels/paged/paged_kv.h"
#include "worker/attention_meter.h"
#include "worker/model/activations.h"
#include "worker/model/shard_plan.h"
#include "worker/model/weights.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

// What all layers of one step share. Borrowed.
struct StepContext {
  const StepBatch& batch;
  const kernels::PagedKv& kv;
  const kernels::RopeTable& rope;
  kernels::RopePositions* compact_rope;  // null: keys are cached rotated, by `rope`
  Activations& activations;
  AttentionMeter& meter;
  Collective& collective;
  kernels::Executor& executor;
};

struct AttentionLayerOptions {
  int64_t layer = 0;
  ShardPlan shard;
  int64_t head_dim = 0;
  float norm_epsilon = 0;
  kernels::DType dtype = kernels::DType::kFloat32;
  // Of the output projection: float32 when it is to be summed over ranks.
  kernels::DType output_dtype = kernels::DType::kFloat32;
};

class AttentionLayer {
 public:
  // Packs the attention weights of `weights` and frees them.
  static absl::StatusOr<AttentionLayer> Create(LayerWeights& weights,
                                               const AttentionLayerOptions& options);

  // output = attention(normed); [tokens, hidden] in options.output_dtype.
  absl::Status Run(const StepContext& step, const kernels::TensorView& output);

  // Scratch that Run needs in StepContext::activations.gemm_scratch.
  int64_t GemmScratchBytes(int num_threads) const;

 private:
  struct Projections {
    kernels::PackedLinear q, k, v, output;
  };
  AttentionLayer(Projections projections, HostTensor q_norm, HostTensor k_norm,
                 const AttentionLayerOptions& options);

  absl::Status ProjectAndAppend(const StepContext& step);
  void PlaceNumbers(const StepBatch& batch);
  absl::StatusOr<kernels::PageSelection> Select(const StepContext& step);
  // What the rows of a group remember of earlier steps.
  std::span<kernels::RowMemory* const> MemoriesOf(const StepBatch& batch,
                                                  const SelectorGroup& group);
  // The query heads that selections of this step are made from.
  absl::StatusOr<kernels::TensorView> SelectionQueries(const StepContext& step) const;
  bool AnySelectionReadsQueries(const StepBatch& batch) const;
  // Makes good what falls short of a policy's min_mass.
  absl::Status KeepContract(const StepContext& step, const SelectorGroup& group,
                            const kernels::SelectParams& params, kernels::PageSelection& rows);
  void MakeTerminations(const StepBatch& batch);
  absl::Status AttendTo(const StepContext& step, const kernels::PageSelection& selection);
  absl::Status Normalize(const StepContext& step, const HostTensor& weight,
                         const ActivationBuffer& heads, int64_t num_heads) const;

  int64_t num_heads() const { return options_.shard.query_heads.size(); }  // of this rank
  int64_t num_kv_heads() const { return options_.shard.kv_heads.size(); }
  float LogitScale() const { return 1.0f / std::sqrt(static_cast<float>(options_.head_dim)); }

  AttentionLayerOptions options_;
  Projections projections_;
  HostTensor q_norm_, k_norm_;                      // empty where the model has none
  std::vector<kernels::SelectionNumbers> numbers_;  // of this step and layer
  std::vector<kernels::RowMemory*> memories_;       // of the rows of a group
  std::vector<uint8_t> faults_;
  // Of this step; empty where no policy ends rows early.
  std::vector<kernels::Termination> terminations_;
  std::vector<kernels::UnreadPages> unread_;
};

}  // namespace kvasir::worker
