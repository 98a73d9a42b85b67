#include "worker/model/transformer.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"
#include "worker/model/rope_frequencies.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::PackedLinear;
using kernels::TensorView;

template <typename Rope>
Rope MakeRope(const TransformerOptions& options) {
  const RopeFrequencies f =
      ComputeRopeFrequencies(options.config, options.longest_position_range());
  return Rope(f.inv_freq, f.attention_factor);
}

std::span<std::byte> GemmScratch(const Activations& a) {
  return {a.gemm_scratch.data(), static_cast<size_t>(a.gemm_scratch.size_bytes())};
}

absl::Span<float> Floats(const TensorView& tensor) {
  return {tensor.As<float>(), static_cast<size_t>(tensor.num_elements())};
}

// All exponent bits set: NaN or infinity. Without branches, so that it runs at memory speed.
bool AllFinite(const TensorView& tensor, int64_t begin_row, int64_t end_row) {
  const int64_t width = tensor.dim(1);
  uint32_t bad = 0;
  for (int64_t i = begin_row * width; i < end_row * width; ++i) {
    if (tensor.dtype() == DType::kFloat32) {
      const uint32_t bits = tensor.As<uint32_t>()[i];
      bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    } else {
      const uint32_t bits = tensor.As<uint16_t>()[i];
      bad |= static_cast<uint32_t>((bits & 0x7f80u) == 0x7f80u);
    }
  }
  return bad == 0;
}

// Copies rows [rows] of `from` to `to`.
absl::Status GatherRows(const TensorView& from, std::vector<int32_t>& rows, const TensorView& to) {
  return kernels::Embedding(
      {.table = from, .ids = TensorView(rows.data(), DType::kInt32, {std::ssize(rows)}), .y = to});
}

}  // namespace

Transformer::Transformer(const TransformerOptions& options)
    : options_(options),
      rope_(MakeRope<kernels::RopeTable>(options)),
      compact_rope_(MakeRope<kernels::RopePositions>(options)) {}

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Create(
    ModelWeights weights, const TransformerOptions& options) {
  auto model = std::unique_ptr<Transformer>(new Transformer(options));
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(model->AddLayer(static_cast<int64_t>(i), std::move(weights.layers[i])));
  }
  const PackedLinear::Part head = {.weight = weights.lm_head.view, .bias = {}};
  KVASIR_ASSIGN_OR_RETURN(PackedLinear packed,
                          PackedLinear::Create(std::span(&head, 1), {.input = options.dtype,
                                                                     .output = DType::kFloat32}));
  model->head_ = std::make_unique<PackedLinear>(std::move(packed));
  model->embedding_ = std::move(weights.embedding);
  model->final_norm_ = std::move(weights.final_norm);
  return model;
}

absl::Status Transformer::AddLayer(int64_t index, LayerWeights weights) {
  const DType dtype = options_.dtype;
  const DType output_dtype = is_parallel() ? DType::kFloat32 : dtype;
  KVASIR_ASSIGN_OR_RETURN(
      AttentionLayer attention,
      AttentionLayer::Create(weights,
                             {.layer = index,
                              .shard = options_.shard,
                              .head_dim = options_.config.head_dim,
                              .norm_epsilon = static_cast<float>(options_.config.rms_norm_eps),
                              .dtype = dtype,
                              .output_dtype = output_dtype}));
  const PackedLinear::Part gate_up_part = {.weight = weights.gate_up.view, .bias = {}};
  KVASIR_ASSIGN_OR_RETURN(
      PackedLinear gate_up,
      PackedLinear::Create(std::span(&gate_up_part, 1), {.input = dtype, .output = dtype}));
  weights.gate_up = {};
  const PackedLinear::Part down_part = {.weight = weights.down.view, .bias = {}};
  KVASIR_ASSIGN_OR_RETURN(
      PackedLinear down,
      PackedLinear::Create(std::span(&down_part, 1), {.input = dtype, .output = output_dtype}));
  layers_.push_back({.input_norm = std::move(weights.input_norm),
                     .attention = std::move(attention),
                     .post_attention_norm = std::move(weights.post_attention_norm),
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

ActivationSizes Transformer::activation_sizes(int64_t max_tokens, int64_t max_logits_rows,
                                              int num_threads) const {
  int64_t gemm_scratch = head_->ScratchBytes(num_threads);
  for (const Layer& layer : layers_) {
    gemm_scratch =
        std::max({gemm_scratch, layer.attention.GemmScratchBytes(num_threads),
                  layer.gate_up.ScratchBytes(num_threads), layer.down.ScratchBytes(num_threads)});
  }
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
          .gemm_scratch_bytes = gemm_scratch,
          .max_tokens = max_tokens,
          .max_logits_rows = max_logits_rows};
}

absl::Status Transformer::Forward(const ForwardParams& params, ForwardResult& result) {
  const int64_t tokens = params.batch.num_tokens();
  if (compact_rope() == nullptr) rope_.SetPositions(params.batch.positions, params.executor);
  std::vector<int32_t> ids = params.batch.tokens;
  KVASIR_RETURN_IF_ERROR(
      GatherRows(embedding_.view, ids, params.activations.residual.Rows(tokens)));
  bool first = true;
  for (Layer& layer : layers_) {
    KVASIR_RETURN_IF_ERROR(RunLayer(params, layer, first));
    first = false;
  }
  CheckRows(params, result.row_is_finite);
  return ComputeLogits(params, result.logits);
}

absl::Status Transformer::RunLayer(const ForwardParams& params, Layer& layer, bool first) {
  const StepContext step = {.batch = params.batch,
                            .kv = params.kv,
                            .rope = rope_,
                            .compact_rope = compact_rope(),
                            .activations = params.activations,
                            .meter = params.meter,
                            .collective = params.collective,
                            .executor = params.executor};
  KVASIR_RETURN_IF_ERROR(AddAndNormalize(params, layer.input_norm, /*add=*/!first));
  KVASIR_RETURN_IF_ERROR(layer.attention.Run(step, LayerOutput(params)));
  KVASIR_RETURN_IF_ERROR(ReduceLayerOutput(params));
  KVASIR_RETURN_IF_ERROR(AddAndNormalize(params, layer.post_attention_norm, /*add=*/true));
  KVASIR_RETURN_IF_ERROR(RunMlp(params, layer));
  return ReduceLayerOutput(params);
}

absl::Status Transformer::RunMlp(const ForwardParams& params, Layer& layer) {
  const Activations& a = params.activations;
  const int64_t tokens = params.batch.num_tokens();
  KVASIR_RETURN_IF_ERROR(layer.gate_up.Run(a.normed.Rows(tokens), a.gate_up.Rows(tokens),
                                           GemmScratch(a), params.executor));
  KVASIR_RETURN_IF_ERROR(kernels::SiluMul(
      {.gate_up = a.gate_up.Rows(tokens), .y = a.gated.Rows(tokens)}, params.executor));
  return layer.down.Run(a.gated.Rows(tokens), LayerOutput(params), GemmScratch(a), params.executor);
}

absl::Status Transformer::AddAndNormalize(const ForwardParams& params, const HostTensor& weight,
                                          bool add) {
  const Activations& a = params.activations;
  const int64_t tokens = params.batch.num_tokens();
  return kernels::RmsNorm({.x = a.residual.Rows(tokens),
                           .add = add ? a.delta.Rows(tokens) : TensorView(),
                           .weight = weight.view,
                           .y = a.normed.Rows(tokens),
                           .epsilon = static_cast<float>(options_.config.rms_norm_eps)},
                          params.executor);
}

TensorView Transformer::LayerOutput(const ForwardParams& params) const {
  const Activations& a = params.activations;
  return (is_parallel() ? a.partial : a.delta).Rows(params.batch.num_tokens());
}

absl::Status Transformer::ReduceLayerOutput(const ForwardParams& params) const {
  if (!is_parallel()) return absl::OkStatus();
  const TensorView partial = LayerOutput(params);
  const TensorView delta = params.activations.delta.Rows(params.batch.num_tokens());
  KVASIR_RETURN_IF_ERROR(params.collective.AllReduceSum(Floats(partial)));
  if (delta.dtype() == DType::kFloat32) {
    std::memcpy(delta.data(), partial.data(), static_cast<size_t>(partial.size_bytes()));
    return absl::OkStatus();
  }
  const int64_t width = partial.dim(1);
  params.executor.ParallelFor(partial.dim(0), [&](int64_t row, int) {
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      delta.As<kernels::BFloat16>()[i] = kernels::BFloat16(partial.As<float>()[i]);
    }
  });
  return absl::OkStatus();
}

// Every token of a row counts, also where nothing is sampled: its KV would poison what follows.
void Transformer::CheckRows(const ForwardParams& params,
                            std::vector<uint8_t>& row_is_finite) const {
  const std::vector<int64_t>& begins = params.batch.row_begins;
  const Activations& a = params.activations;
  const int64_t tokens = params.batch.num_tokens();
  row_is_finite.clear();
  for (size_t r = 0; r + 1 < begins.size(); ++r) {
    row_is_finite.push_back(AllFinite(a.residual.Rows(tokens), begins[r], begins[r + 1]) &&
                            AllFinite(a.delta.Rows(tokens), begins[r], begins[r + 1]));
  }
}

absl::Status Transformer::ComputeLogits(const ForwardParams& params, TensorView& logits) {
  const Activations& a = params.activations;
  const int64_t tokens = params.batch.num_tokens();
  const int64_t rows = std::ssize(params.batch.sampled_tokens);
  logits = a.logits.Rows(rows);
  if (rows == 0) return absl::OkStatus();
  std::vector<int32_t> ids(params.batch.sampled_tokens.begin(), params.batch.sampled_tokens.end());
  const TensorView x = a.last_residual.Rows(rows);
  KVASIR_RETURN_IF_ERROR(GatherRows(a.residual.Rows(tokens), ids, x));
  KVASIR_RETURN_IF_ERROR(GatherRows(a.delta.Rows(tokens), ids, a.last_delta.Rows(rows)));
  KVASIR_RETURN_IF_ERROR(
      kernels::RmsNorm({.x = x,
                        .add = a.last_delta.Rows(rows),
                        .weight = final_norm_.view,
                        .y = x,
                        .epsilon = static_cast<float>(options_.config.rms_norm_eps)},
                       params.executor));
  if (!is_parallel()) return head_->Run(x, logits, GemmScratch(a), params.executor);
  const TensorView local(a.local_logits.Rows(rows).data(), DType::kFloat32,
                         {rows, head_->out_features()});
  KVASIR_RETURN_IF_ERROR(head_->Run(x, local, GemmScratch(a), params.executor));
  return GatherLogits(params, logits);
}

// Ranks own ranges of the vocabulary; the last may be narrower, and sends padding.
absl::Status Transformer::GatherLogits(const ForwardParams& params, const TensorView& logits) {
  const Activations& a = params.activations;
  const int64_t rows = logits.dim(0);
  const int64_t width = options_.shard.vocab_rows_per_rank;
  const TensorView local = a.local_logits.Rows(rows);
  const int64_t own = head_->out_features();
  // Widens the rows in place, last row first, so that none is overwritten before it is moved.
  for (int64_t r = rows - 1; r > 0 && own < width; --r) {
    std::memmove(local.As<float>() + r * width, local.As<float>() + r * own,
                 static_cast<size_t>(own) * sizeof(float));
  }
  const TensorView gathered = a.gathered_logits.Rows(rows * options_.shard.num_ranks);
  KVASIR_RETURN_IF_ERROR(params.collective.AllGather(Floats(local), Floats(gathered)));
  for (int64_t rank = 0; rank < options_.shard.num_ranks; ++rank) {
    const int64_t begin = rank * width;
    const int64_t columns = std::clamp<int64_t>(options_.config.vocab_size - begin, 0, width);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(gathered.As<float>() + (rank * rows + r) * width, columns,
                  logits.As<float>() + r * options_.config.vocab_size + begin);
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
