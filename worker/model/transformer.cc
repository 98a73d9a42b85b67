#include "worker/model/transformer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/rope_frequencies.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::LinearParams;
using kernels::PackedLinear;
using kernels::TensorView;

absl::StatusOr<std::unique_ptr<Linear>> MakeLinear(const Tensor& weight,
                                                   const PackedLinear::Options& options,
                                                   Backend& backend) {
  const PackedLinear::Part part = {.weight = weight.view, .bias = {}};
  return backend.MakeLinear(std::span(&part, 1), options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Create(ModelWeights weights,
                                                                 const TransformerOptions& options,
                                                                 Backend& backend) {
  auto model = std::unique_ptr<Transformer>(new Transformer(options, backend));
  KVASIR_ASSIGN_OR_RETURN(
      model->rope_,
      backend.MakeRope(
          ComputeRopeFrequencies(options.config, options.longest_position_range()),
          {.rotated = options.extension == PositionExtension::kNone, .grouped = options.grouped}));
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(model->AddLayer(static_cast<int64_t>(i), std::move(weights.layers[i])));
  }
  KVASIR_ASSIGN_OR_RETURN(
      model->head_,
      MakeLinear(weights.lm_head,
                 {.input = options.dtype, .output = DType::kFloat32, .weights = options.weights},
                 backend));
  KVASIR_ASSIGN_OR_RETURN(model->embedding_, backend.Place(std::move(weights.embedding)));
  KVASIR_ASSIGN_OR_RETURN(model->final_norm_, backend.Place(std::move(weights.final_norm)));
  return model;
}

absl::Status Transformer::AddLayer(int64_t index, LayerWeights weights) {
  const DType dtype = options_.dtype;
  const DType output_dtype = is_parallel() ? DType::kFloat32 : dtype;
  KVASIR_ASSIGN_OR_RETURN(AttentionLayer attention,
                          AttentionLayer::Create(weights,
                                                 {.layer = index,
                                                  .shard = options_.shard,
                                                  .head_dim = options_.config.head_dim,
                                                  .norm_epsilon = norm_epsilon(),
                                                  .dtype = dtype,
                                                  .output_dtype = output_dtype,
                                                  .weights = options_.weights},
                                                 backend_));
  PackedLinear::Options linear = {.input = dtype, .output = dtype, .weights = options_.weights};
  KVASIR_ASSIGN_OR_RETURN(auto gate_up, MakeLinear(weights.gate_up, linear, backend_));
  weights.gate_up = {};
  linear.output = output_dtype;
  KVASIR_ASSIGN_OR_RETURN(auto down, MakeLinear(weights.down, linear, backend_));
  KVASIR_ASSIGN_OR_RETURN(Tensor post_attention_norm,
                          backend_.Place(std::move(weights.post_attention_norm)));
  layers_.push_back({.attention = std::move(attention),
                     .post_attention_norm = std::move(post_attention_norm),
                     .gate_up = std::move(gate_up),
                     .down = std::move(down)});
  return absl::OkStatus();
}

kernels::KvLayout Transformer::kv_layout(DType kv_dtype) const {
  return {.num_layers = options_.config.num_layers,
          .num_kv_heads = options_.shard.kv_heads.size(),
          .head_dim = options_.config.head_dim,
          .dtype = kv_dtype};
}

ActivationSizes Transformer::activation_sizes(int64_t max_tokens, int64_t max_logits_rows) const {
  return {.dtype = options_.dtype,
          .hidden = options_.config.hidden_size,
          .num_heads = options_.shard.query_heads.size(),
          .num_kv_heads = options_.shard.kv_heads.size(),
          .head_dim = options_.config.head_dim,
          .intermediate = options_.shard.intermediate.size(),
          .vocab = options_.config.vocab_size,
          .vocab_rows = options_.shard.vocab_rows_per_rank,
          .num_ranks = options_.shard.num_ranks,
          .kv_replicas = options_.shard.kv_replicas,
          .max_tokens = max_tokens,
          .max_logits_rows = max_logits_rows};
}

absl::Status Transformer::WarmUp(const Activations& activations, int64_t max_tokens) const {
  constexpr int64_t kFewestTokens = 16;
  if (!backend_.StartsSlowly() || layers_.empty()) return absl::OkStatus();
  const Layer& layer = layers_.front();  // the others have the same shapes
  for (int64_t tokens = std::min(kFewestTokens, max_tokens);; tokens *= 2) {
    tokens = std::min(tokens, max_tokens);
    const TensorView residual = activations.residual.Rows(tokens);
    KVASIR_RETURN_IF_ERROR(
        layer.attention.WarmUp(activations, tokens, AddTo(residual, activations)));
    KVASIR_RETURN_IF_ERROR(RunMlp(residual, activations, layer));
    if (tokens == max_tokens) return absl::OkStatus();
  }
}

absl::Status Transformer::Forward(const ForwardParams& params) {
  const Activations& a = params.activations;
  const int64_t tokens = params.batch.num_tokens();
  KVASIR_ASSIGN_OR_RETURN(const bool wants_ops,
                          backend_.BeginStep({.batch = params.batch,
                                              .kv = params.kv,
                                              .rope = *rope_,
                                              .shard = options_.shard,
                                              .meter = params.meter,
                                              .collective = params.collective,
                                              .vocab_size = options_.config.vocab_size}));
  const TensorView logits = a.logits.Rows(std::ssize(params.batch.sampled_tokens));
  if (wants_ops) {
    KVASIR_RETURN_IF_ERROR(
        Compute({.batch = params.batch, .activations = a, .backend = backend_}, logits));
  }
  return backend_.EndStep({.residual = a.residual.Rows(tokens), .logits = logits});
}

absl::Status Transformer::Compute(const StepContext& step, const TensorView& logits) const {
  const Activations& a = step.activations;
  const TensorView residual = a.residual.Rows(step.batch.num_tokens());
  KVASIR_RETURN_IF_ERROR(backend_.EmbedTokens(embedding_.view, residual));
  for (size_t i = 0; i < layers_.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(RunAttention(step, residual, layers_[i]));
    if (i + 1 == layers_.size()) break;
    KVASIR_RETURN_IF_ERROR(RunMlp(residual, a, layers_[i]));
    KVASIR_RETURN_IF_ERROR(AddSummands(residual, a));
  }
  KVASIR_RETURN_IF_ERROR(ScoreTokens(step, residual));
  if (logits.dim(0) > 0) {  // last, because these logits may be kept
    const TensorView sampled = a.last_residual.Rows(logits.dim(0));
    KVASIR_RETURN_IF_ERROR(backend_.TakeSampled(residual, sampled));
    KVASIR_RETURN_IF_ERROR(FinishRows(sampled, a, logits));
  }
  return backend_.Sample(logits);
}

absl::Status Transformer::ScoreTokens(const StepContext& step, const TensorView& residual) const {
  const Activations& a = step.activations;
  const int64_t total = std::ssize(step.batch.scored_tokens);
  for (int64_t first = 0; first < total; first += a.logits.max_rows()) {
    const int64_t count = std::min(a.logits.max_rows(), total - first);
    const TensorView rows = a.last_residual.Rows(count);
    const TensorView logits = a.logits.Rows(count);
    KVASIR_RETURN_IF_ERROR(backend_.TakeScored(residual, first, rows));
    KVASIR_RETURN_IF_ERROR(FinishRows(rows, a, logits));
    KVASIR_RETURN_IF_ERROR(backend_.Score(logits, first));
  }
  return absl::OkStatus();
}

absl::Status Transformer::RunAttention(const StepContext& step, const TensorView& residual,
                                       const Layer& layer) const {
  KVASIR_RETURN_IF_ERROR(layer.attention.Run(step, AddTo(residual, step.activations)));
  return AddSummands(residual, step.activations);
}

absl::Status Transformer::RunMlp(const TensorView& residual, const Activations& a,
                                 const Layer& layer) const {
  const int64_t rows = residual.dim(0);
  KVASIR_RETURN_IF_ERROR(layer.gate_up->Run({.x = residual,
                                             .norm = layer.post_attention_norm.view,
                                             .epsilon = norm_epsilon(),
                                             .after = LinearParams::After::kSiluMul,
                                             .y = a.gated.Rows(rows),
                                             .normed = a.normed.Rows(rows),
                                             .product = a.gate_up.Rows(rows)}));
  LinearParams down = AddTo(residual, a);
  down.x = a.gated.Rows(rows);
  return layer.down->Run(down);
}

LinearParams Transformer::AddTo(const TensorView& residual, const Activations& a) const {
  const int64_t rows = residual.dim(0);
  if (is_parallel()) return {.x = {}, .y = a.partial.Rows(rows)};
  return {
      .x = {}, .after = LinearParams::After::kAdd, .y = residual, .product = a.summand.Rows(rows)};
}

absl::Status Transformer::AddSummands(const TensorView& residual, const Activations& a) const {
  if (!is_parallel()) return absl::OkStatus();
  return backend_.AddOverRanks(a.partial.Rows(residual.dim(0)), residual);
}

absl::Status Transformer::FinishRows(const TensorView& rows, const Activations& a,
                                     const TensorView& logits) const {
  if (!layers_.empty()) {
    KVASIR_RETURN_IF_ERROR(RunMlp(rows, a, layers_.back()));
    KVASIR_RETURN_IF_ERROR(AddSummands(rows, a));
  }
  return ComputeLogits(rows, a, logits);
}

absl::Status Transformer::ComputeLogits(const TensorView& rows, const Activations& a,
                                        const TensorView& logits) const {
  const int64_t count = logits.dim(0);
  // Ranks own ranges of the vocabulary; the last may be narrower.
  const TensorView local = a.local_logits.Rows(is_parallel() ? count : 0);
  const TensorView own = is_parallel() ? TensorView(local.data(), DType::kFloat32,
                                                    {count, head_->out_features()}, local.device())
                                       : logits;
  KVASIR_RETURN_IF_ERROR(head_->Run(
      {.x = rows, .norm = final_norm_.view, .epsilon = norm_epsilon(), .y = own, .normed = rows}));
  if (!is_parallel()) return absl::OkStatus();
  return backend_.GatherColumns(
      {.own = local,
       .gathered = a.gathered_logits.Rows(count * options_.shard.num_ranks),
       .y = logits});
}

}  // namespace kvasir::worker
