#include "worker/model/attention_layer.h"

#include <span>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::LinearParams;
using kernels::PackedLinear;
using kernels::TensorView;

absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(const Tensor& weight, const Tensor& bias,
                                                   const PackedLinear::Options& options,
                                                   Backend& backend) {
  const PackedLinear::Part part = {.weight = weight.view, .bias = bias.view};
  return backend.MakeLinear(std::span(&part, 1), options);
}

}  // namespace

absl::StatusOr<AttentionLayer> AttentionLayer::Create(LayerWeights& weights,
                                                      const AttentionLayerOptions& options,
                                                      Backend& backend) {
  const DType dtype = options.dtype;
  PackedLinear::Options linear = {.input = dtype, .output = dtype, .weights = options.weights};
  AttentionLayer layer(options);
  KVASIR_ASSIGN_OR_RETURN(layer.qkv_, MakeLinear(weights.qkv, weights.qkv_bias, linear, backend));
  weights.qkv = {};
  weights.qkv_bias = {};
  linear.output = options.output_dtype;
  KVASIR_ASSIGN_OR_RETURN(layer.output_,
                          MakeLinear(weights.output, weights.output_bias, linear, backend));
  weights.output = {};
  weights.output_bias = {};
  KVASIR_ASSIGN_OR_RETURN(layer.input_norm_, backend.Place(std::move(weights.input_norm)));
  KVASIR_ASSIGN_OR_RETURN(layer.q_norm_, backend.Place(std::move(weights.q_norm)));
  KVASIR_ASSIGN_OR_RETURN(layer.k_norm_, backend.Place(std::move(weights.k_norm)));
  return layer;
}

absl::Status AttentionLayer::Run(const StepContext& step, const LinearParams& input,
                                 LinearParams output) const {
  const Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  KVASIR_RETURN_IF_ERROR(ProjectAndAppend(step, input));
  KVASIR_ASSIGN_OR_RETURN(const TensorView selection_queries, SelectionQueries(step));
  KVASIR_RETURN_IF_ERROR(step.backend.Select(Queries(selection_queries)));
  KVASIR_RETURN_IF_ERROR(step.backend.Attend(Queries(a.q.Heads(tokens, num_heads())),
                                             a.attended.Heads(tokens, num_heads())));
  output.x = a.attended.Rows(tokens);
  return output_->Run(output);
}

absl::Status AttentionLayer::WarmUp(const Activations& a, const LinearParams& input,
                                    LinearParams output) const {
  KVASIR_RETURN_IF_ERROR(Project(a, input));
  output.x = a.attended.Rows(input.x.dim(0));
  return output_->Run(output);
}

absl::Status AttentionLayer::Project(const Activations& a, LinearParams input) const {
  input.y = a.qkv.Rows(input.x.dim(0));
  return qkv_->Run(input);
}

absl::Status AttentionLayer::ProjectAndAppend(const StepContext& step,
                                              const LinearParams& input) const {
  const Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  KVASIR_RETURN_IF_ERROR(Project(a, input));
  return step.backend.AppendHeads({.layer = options_.layer,
                                   .qkv = a.qkv.Rows(tokens),
                                   .q_norm = q_norm_.view,
                                   .k_norm = k_norm_.view,
                                   .epsilon = options_.norm_epsilon,
                                   .q = a.q.Heads(tokens, num_heads()),
                                   .k = a.k.Heads(tokens, num_kv_heads()),
                                   .v = a.v.Heads(tokens, num_kv_heads())});
}

bool AttentionLayer::AnySelectionReadsQueries(const StepBatch& batch) const {
  if (WindowOfLayer(batch, options_.layer) != 0) return false;
  for (const SelectorGroup& group : batch.groups) {
    for (int64_t b = group.begin; b < group.end; ++b) {
      const auto i = static_cast<size_t>(b);
      const bool reads =
          group.served->selector->ReadsQueries() || batch.numbers[i].quality.min_mass > 0;
      if (reads && options_.layer >= batch.infos[i].dense_layers) return true;
    }
  }
  return false;
}

// The scope of a selection is the KV group. Where its query heads lie on several ranks, each rank
// gets all of them and selects for itself: the same queries and the same bounds give the same
// pages. All ranks take part, because the batch is the same on all.
absl::StatusOr<TensorView> AttentionLayer::SelectionQueries(const StepContext& step) const {
  const Activations& a = step.activations;
  const ShardPlan& shard = options_.shard;
  const int64_t tokens = step.batch.num_tokens();
  if (shard.kv_replicas == 1 || !AnySelectionReadsQueries(step.batch)) {
    return a.q.Heads(tokens, num_heads());
  }
  KVASIR_RETURN_IF_ERROR(
      step.backend.GatherColumns({.own = a.q.Rows(tokens),
                                  .gathered = a.gathered_q.Rows(shard.num_ranks * tokens),
                                  .y = a.group_q.Rows(tokens),
                                  .first_rank = shard.rank - shard.replica()}));
  return a.group_q.Heads(tokens, shard.kv_replicas * num_heads());
}

}  // namespace kvasir::worker
