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

absl::Status Transformer::WarmUp(const Activations& a, int64_t max_tokens) const {
  constexpr int64_t kFewestTokens = 16;
  if (!backend_.StartsSlowly() || layers_.empty()) return absl::OkStatus();
  const Layer& layer = layers_.front();  // the others have the same shapes
  const Tensor& input_norm = layer.attention.input_norm();
  for (int64_t tokens = std::min(kFewestTokens, max_tokens);; tokens *= 2) {
    tokens = std::min(tokens, max_tokens);
    const TensorView residual = a.residual.Rows(tokens);
    KVASIR_RETURN_IF_ERROR(layer.attention.WarmUp(
        a, Norm(residual, input_norm, false, a),
        AddTo(residual, layer.attention.output(), &layer.post_attention_norm, a)));
    KVASIR_RETURN_IF_ERROR(RunMlp(Norm(residual, layer.post_attention_norm, false, a),
                                  AddTo(residual, *layer.down, &input_norm, a), a, layer));
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
  bool is_normed = false;  // whether a.normed holds what the next half of a layer begins with
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const bool is_last = i + 1 == layers_.size();
    const LinearParams attended = AddTo(residual, layer.attention.output(),
                                        is_last ? nullptr : &layer.post_attention_norm, a);
    KVASIR_RETURN_IF_ERROR(layer.attention.Run(
        step, Norm(residual, layer.attention.input_norm(), is_normed, a), attended));
    KVASIR_RETURN_IF_ERROR(AddSummands(residual, a));
    if (is_last) break;
    is_normed = !attended.next_norm.empty();
    const LinearParams down =
        AddTo(residual, *layer.down, &layers_[i + 1].attention.input_norm(), a);
    KVASIR_RETURN_IF_ERROR(
        RunMlp(Norm(residual, layer.post_attention_norm, is_normed, a), down, a, layer));
    KVASIR_RETURN_IF_ERROR(AddSummands(residual, a));
    is_normed = !down.next_norm.empty();
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

absl::Status Transformer::RunMlp(LinearParams x, LinearParams down, const Activations& a,
                                 const Layer& layer) const {
  const int64_t rows = x.x.dim(0);
  x.after = LinearParams::After::kSiluMul;
  x.y = a.gated.Rows(rows);
  x.product = a.gate_up.Rows(rows);
  KVASIR_RETURN_IF_ERROR(layer.gate_up->Run(x));
  down.x = a.gated.Rows(rows);
  return layer.down->Run(down);
}

LinearParams Transformer::Norm(const TensorView& residual, const Tensor& norm, bool is_normed,
                               const Activations& a) const {
  const TensorView normed = a.normed.Rows(residual.dim(0));
  if (is_normed) return {.x = normed, .y = {}};
  return {.x = residual, .norm = norm.view, .epsilon = norm_epsilon(), .y = {}, .normed = normed};
}

LinearParams Transformer::AddTo(const TensorView& residual, const Linear& layer,
                                const Tensor* next_norm, const Activations& a) const {
  const int64_t rows = residual.dim(0);
  if (is_parallel()) return {.x = {}, .y = a.partial.Rows(rows)};
  LinearParams params = {
      .x = {}, .after = LinearParams::After::kAdd, .y = residual, .product = a.summand.Rows(rows)};
  if (next_norm != nullptr && layer.normalizes_sums(rows)) {
    params.epsilon = norm_epsilon();
    params.next_norm = next_norm->view;
    params.next_normed = a.normed.Rows(rows);
  }
  return params;
}

absl::Status Transformer::AddSummands(const TensorView& residual, const Activations& a) const {
  if (!is_parallel()) return absl::OkStatus();
  return backend_.AddOverRanks(a.partial.Rows(residual.dim(0)), residual);
}

absl::Status Transformer::FinishRows(const TensorView& rows, const Activations& a,
                                     const TensorView& logits) const {
  bool is_normed = false;
  if (!layers_.empty()) {
    const Layer& last = layers_.back();
    const LinearParams down = AddTo(rows, *last.down, &final_norm_, a);
    KVASIR_RETURN_IF_ERROR(RunMlp(Norm(rows, last.post_attention_norm, false, a), down, a, last));
    KVASIR_RETURN_IF_ERROR(AddSummands(rows, a));
    is_normed = !down.next_norm.empty();
  }
  return ComputeLogits(Norm(rows, final_norm_, is_normed, a), a, logits);
}

absl::Status Transformer::ComputeLogits(LinearParams x, const Activations& a,
                                        const TensorView& logits) const {
  const int64_t count = logits.dim(0);
  // Ranks own ranges of the vocabulary; the last may be narrower.
  const TensorView local = a.local_logits.Rows(is_parallel() ? count : 0);
  x.y = is_parallel() ? TensorView(local.data(), DType::kFloat32, {count, head_->out_features()},
                                   local.device())
                      : logits;
  KVASIR_RETURN_IF_ERROR(head_->Run(x));
  if (!is_parallel()) return absl::OkStatus();
  return backend_.GatherColumns(
      {.own = local,
       .gathered = a.gathered_logits.Rows(count * options_.shard.num_ranks),
       .y = logits});
}

}  // namespace kvasir::worker
