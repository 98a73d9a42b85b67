// The attention half of a decoder layer: norm, projections, rotary embedding, KV append, selection
// by each row's policy, attention over pages, output projection. One path for dense and sparse, for
// prefill and decode, and for every backend. It holds the layer's weights and borrows the step's
// memory. Called by the transformer. Thread-compatible.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "worker/backend/backend.h"
#include "worker/batch/step_batch.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/weights.h"
#include "worker/model/activations.h"

namespace kvasir::worker {

// Arguments that all layers of one step share. Borrowed; the backend has begun the step.
struct StepContext {
  const StepBatch& batch;
  const Activations& activations;
  Backend& backend;
};

struct AttentionLayerOptions {
  int64_t layer = 0;
  ShardPlan shard;
  int64_t head_dim = 0;
  float norm_epsilon = 0;
  kernels::DType dtype = kernels::DType::kFloat32;
  // Result of the output projection: float32 when it will be summed over ranks.
  kernels::DType output_dtype = kernels::DType::kFloat32;
  kernels::WeightForm weights = kernels::WeightForm::kAsInput;
};

class AttentionLayer {
 public:
  // Hands the attention weights of `weights` to the backend, and frees them.
  static absl::StatusOr<AttentionLayer> Create(LayerWeights& weights,
                                               const AttentionLayerOptions& options,
                                               Backend& backend);

  // Runs only the layer's products, for Transformer::WarmUp. Arguments are as for Run.
  absl::Status WarmUp(const Activations& a, const kernels::LinearParams& input,
                      kernels::LinearParams output) const;

  // Computes the output projection of attention to `input`: the residual's rows with input_norm(),
  // or these rows normalized. `output` has all of the projection's arguments except x.
  absl::Status Run(const StepContext& step, const kernels::LinearParams& input,
                   kernels::LinearParams output) const;

  const Tensor& input_norm() const { return input_norm_; }
  const Linear& output() const { return *output_; }

 private:
  explicit AttentionLayer(const AttentionLayerOptions& options) : options_(options) {}

  absl::Status Project(const Activations& a, kernels::LinearParams input) const;
  absl::Status ProjectAndAppend(const StepContext& step, const kernels::LinearParams& input) const;
  // Returns the query heads that this step's selections are made from.
  absl::StatusOr<kernels::TensorView> SelectionQueries(const StepContext& step) const;
  bool AnySelectionReadsQueries(const StepBatch& batch) const;
  LayerQueries Queries(const kernels::TensorView& q) const {
    return {.layer = options_.layer,
            .scale = 1.0f / std::sqrt(static_cast<float>(options_.head_dim)),
            .q = q};
  }

  int64_t num_heads() const { return options_.shard.query_heads.size(); }  // of this rank
  int64_t num_kv_heads() const { return options_.shard.kv_heads.size(); }

  AttentionLayerOptions options_;
  Tensor input_norm_;
  std::unique_ptr<Linear> qkv_, output_;
  Tensor q_norm_, k_norm_;  // empty where the model has none
};

}  // namespace kvasir::worker
