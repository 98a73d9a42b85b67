#include "worker/model/attention_layer.h"

#include <span>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/dense/rms_norm.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::PackedLinear;
using kernels::TensorView;

// Rows [begin, begin + rows) of a matrix, or elements of a vector; empty stays empty.
TensorView Slice(const TensorView& tensor, int64_t begin, int64_t rows) {
  if (tensor.empty()) return {};
  const int64_t row_bytes = tensor.size_bytes() / tensor.dim(0);
  std::byte* data = static_cast<std::byte*>(tensor.data()) + begin * row_bytes;
  if (tensor.rank() == 1) return TensorView(data, tensor.dtype(), {rows}, tensor.device());
  return TensorView(data, tensor.dtype(), {rows, tensor.dim(1)}, tensor.device());
}

absl::StatusOr<std::unique_ptr<Linear>> PackRows(const LayerWeights& weights, int64_t begin,
                                                 int64_t rows, DType dtype, Backend& backend) {
  const PackedLinear::Part part = {.weight = Slice(weights.qkv.view, begin, rows),
                                   .bias = Slice(weights.qkv_bias.view, begin, rows)};
  return backend.MakeLinear(std::span(&part, 1), {.input = dtype, .output = dtype});
}

}  // namespace

absl::StatusOr<AttentionLayer> AttentionLayer::Create(LayerWeights& weights,
                                                      const AttentionLayerOptions& options,
                                                      Backend& backend) {
  const DType dtype = options.dtype;
  const int64_t q_rows = options.shard.query_heads.size() * options.head_dim;
  const int64_t kv_rows = options.shard.kv_heads.size() * options.head_dim;
  AttentionLayer layer(options);
  // Three products instead of one: their results are what the ops below take, without a copy.
  KVASIR_ASSIGN_OR_RETURN(layer.q_, PackRows(weights, 0, q_rows, dtype, backend));
  KVASIR_ASSIGN_OR_RETURN(layer.k_, PackRows(weights, q_rows, kv_rows, dtype, backend));
  KVASIR_ASSIGN_OR_RETURN(layer.v_, PackRows(weights, q_rows + kv_rows, kv_rows, dtype, backend));
  weights.qkv = {};
  weights.qkv_bias = {};
  const PackedLinear::Part out_part = {.weight = weights.output.view,
                                       .bias = weights.output_bias.view};
  KVASIR_ASSIGN_OR_RETURN(layer.output_,
                          backend.MakeLinear(std::span(&out_part, 1),
                                             {.input = dtype, .output = options.output_dtype}));
  weights.output = {};
  weights.output_bias = {};
  KVASIR_ASSIGN_OR_RETURN(layer.q_norm_, backend.Place(std::move(weights.q_norm)));
  KVASIR_ASSIGN_OR_RETURN(layer.k_norm_, backend.Place(std::move(weights.k_norm)));
  return layer;
}

absl::Status AttentionLayer::Run(const StepContext& step, const TensorView& output) const {
  const Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  KVASIR_RETURN_IF_ERROR(ProjectAndAppend(step));
  KVASIR_ASSIGN_OR_RETURN(const TensorView selection_queries, SelectionQueries(step));
  KVASIR_RETURN_IF_ERROR(step.backend.Select(Queries(selection_queries)));
  KVASIR_RETURN_IF_ERROR(step.backend.Attend(Queries(a.q.Heads(tokens, num_heads())),
                                             a.attended.Heads(tokens, num_heads())));
  return output_->Run(a.attended.Rows(tokens), output);
}

absl::Status AttentionLayer::ProjectAndAppend(const StepContext& step) const {
  const Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  const TensorView x = a.normed.Rows(tokens);
  KVASIR_RETURN_IF_ERROR(q_->Run(x, a.q.Rows(tokens)));
  KVASIR_RETURN_IF_ERROR(k_->Run(x, a.k.Rows(tokens)));
  KVASIR_RETURN_IF_ERROR(v_->Run(x, a.v.Rows(tokens)));
  KVASIR_RETURN_IF_ERROR(Normalize(step, q_norm_, a.q, num_heads()));
  KVASIR_RETURN_IF_ERROR(Normalize(step, k_norm_, a.k, num_kv_heads()));
  const TensorView k = a.k.Heads(tokens, num_kv_heads());
  KVASIR_RETURN_IF_ERROR(step.backend.Rotate(a.q.Heads(tokens, num_heads())));
  KVASIR_RETURN_IF_ERROR(step.backend.Rotate(k));
  return step.backend.AppendKv(options_.layer, k, a.v.Heads(tokens, num_kv_heads()));
}

absl::Status AttentionLayer::Normalize(const StepContext& step, const Tensor& weight,
                                       const ActivationBuffer& heads, int64_t num_heads) const {
  if (weight.view.empty()) return absl::OkStatus();
  const TensorView x = heads.Heads(step.batch.num_tokens(), num_heads);
  const TensorView rows(x.data(), x.dtype(), {x.dim(0) * num_heads, options_.head_dim}, x.device());
  return step.backend.RmsNorm(
      {.x = rows, .add = {}, .weight = weight.view, .y = rows, .epsilon = options_.norm_epsilon});
}

bool AttentionLayer::AnySelectionReadsQueries(const StepBatch& batch) const {
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

// The scope of a selection is the KV group. Where its query heads lie on several ranks, each of
// them gets all of them and selects for itself: the same queries and the same bounds give the same
// pages. All ranks take part, for the batch is the same on all.
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
