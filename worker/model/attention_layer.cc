#include "worker/model/attention_layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "kernels/attention/attend.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/paged/append.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::PackedLinear;
using kernels::PageSelection;
using kernels::QueryBlock;
using kernels::TensorView;

// Rows [begin, begin + rows) of a matrix, or elements of a vector; empty stays empty.
TensorView Slice(const TensorView& tensor, int64_t begin, int64_t rows) {
  if (tensor.empty()) return {};
  const int64_t row_bytes = tensor.size_bytes() / tensor.dim(0);
  std::byte* data = static_cast<std::byte*>(tensor.data()) + begin * row_bytes;
  if (tensor.rank() == 1) return TensorView(data, tensor.dtype(), {rows});
  return TensorView(data, tensor.dtype(), {rows, tensor.dim(1)});
}

absl::StatusOr<PackedLinear> PackRows(const LayerWeights& weights, int64_t begin, int64_t rows,
                                      DType dtype) {
  const PackedLinear::Part part = {.weight = Slice(weights.qkv.view, begin, rows),
                                   .bias = Slice(weights.qkv_bias.view, begin, rows)};
  return PackedLinear::Create(std::span(&part, 1), {.input = dtype, .output = dtype});
}

std::span<std::byte> GemmScratch(const StepContext& step) {
  const kernels::HostBuffer& scratch = step.activations.gemm_scratch;
  return {scratch.data(), static_cast<size_t>(scratch.size_bytes())};
}

// A row that selected an absent page has no result. NaN makes it fail on every rank of the group,
// through the sums that follow, and on no other row.
void PoisonRows(const TensorView& out, const QueryBlock& block) {
  const int64_t width = out.dim(1) * out.dim(2);
  for (int64_t i = block.first_row * width; i < (block.first_row + block.num_rows) * width; ++i) {
    if (out.dtype() == DType::kFloat32) {
      out.As<float>()[i] = std::numeric_limits<float>::quiet_NaN();
    } else {
      out.As<kernels::BFloat16>()[i] = kernels::BFloat16(std::numeric_limits<float>::quiet_NaN());
    }
  }
}

}  // namespace

AttentionLayer::AttentionLayer(Projections projections, HostTensor q_norm, HostTensor k_norm,
                               const AttentionLayerOptions& options)
    : options_(options),
      projections_(std::move(projections)),
      q_norm_(std::move(q_norm)),
      k_norm_(std::move(k_norm)) {}

absl::StatusOr<AttentionLayer> AttentionLayer::Create(LayerWeights& weights,
                                                      const AttentionLayerOptions& options) {
  const int64_t q_rows = options.num_heads * options.head_dim;
  const int64_t kv_rows = options.num_kv_heads * options.head_dim;
  // Three products instead of one: their results are what the ops below take, without a copy.
  KVASIR_ASSIGN_OR_RETURN(PackedLinear q, PackRows(weights, 0, q_rows, options.dtype));
  KVASIR_ASSIGN_OR_RETURN(PackedLinear k, PackRows(weights, q_rows, kv_rows, options.dtype));
  KVASIR_ASSIGN_OR_RETURN(PackedLinear v,
                          PackRows(weights, q_rows + kv_rows, kv_rows, options.dtype));
  weights.qkv = {};
  weights.qkv_bias = {};
  const PackedLinear::Part out_part = {.weight = weights.output.view,
                                       .bias = weights.output_bias.view};
  KVASIR_ASSIGN_OR_RETURN(
      PackedLinear output,
      PackedLinear::Create(std::span(&out_part, 1),
                           {.input = options.dtype, .output = options.output_dtype}));
  weights.output = {};
  weights.output_bias = {};
  return AttentionLayer(
      {.q = std::move(q), .k = std::move(k), .v = std::move(v), .output = std::move(output)},
      std::move(weights.q_norm), std::move(weights.k_norm), options);
}

int64_t AttentionLayer::GemmScratchBytes(int num_threads) const {
  const Projections& p = projections_;
  return std::max({p.q.ScratchBytes(num_threads), p.k.ScratchBytes(num_threads),
                   p.v.ScratchBytes(num_threads), p.output.ScratchBytes(num_threads)});
}

absl::Status AttentionLayer::Run(const StepContext& step, const TensorView& output) {
  KVASIR_RETURN_IF_ERROR(ProjectAndAppend(step));
  KVASIR_ASSIGN_OR_RETURN(const PageSelection selection, Select(step));
  step.meter.Count(selection, step.kv, options_.layer);
  KVASIR_RETURN_IF_ERROR(AttendTo(step, selection));
  return projections_.output.Run(step.activations.attended.Rows(step.batch.num_tokens()), output,
                                 GemmScratch(step), step.executor);
}

absl::Status AttentionLayer::ProjectAndAppend(const StepContext& step) {
  const Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  const TensorView x = a.normed.Rows(tokens);
  kernels::Executor& executor = step.executor;
  KVASIR_RETURN_IF_ERROR(projections_.q.Run(x, a.q.Rows(tokens), GemmScratch(step), executor));
  KVASIR_RETURN_IF_ERROR(projections_.k.Run(x, a.k.Rows(tokens), GemmScratch(step), executor));
  KVASIR_RETURN_IF_ERROR(projections_.v.Run(x, a.v.Rows(tokens), GemmScratch(step), executor));
  KVASIR_RETURN_IF_ERROR(Normalize(step, q_norm_, a.q, options_.num_heads));
  KVASIR_RETURN_IF_ERROR(Normalize(step, k_norm_, a.k, options_.num_kv_heads));
  const TensorView k = a.k.Heads(tokens, options_.num_kv_heads);
  KVASIR_RETURN_IF_ERROR(ApplyRope(step.rope, a.q.Heads(tokens, options_.num_heads), executor));
  KVASIR_RETURN_IF_ERROR(ApplyRope(step.rope, k, executor));
  return kernels::AppendKv({.k = k,
                            .v = a.v.Heads(tokens, options_.num_kv_heads),
                            .kv = step.kv,
                            .layer = options_.layer,
                            .blocks = step.batch.appends},
                           executor);
}

absl::Status AttentionLayer::Normalize(const StepContext& step, const HostTensor& weight,
                                       const ActivationBuffer& heads, int64_t num_heads) const {
  if (weight.view.empty()) return absl::OkStatus();
  const TensorView x = heads.Heads(step.batch.num_tokens(), num_heads);
  const TensorView rows(x.data(), x.dtype(), {x.dim(0) * num_heads, options_.head_dim});
  return kernels::RmsNorm(
      {.x = rows, .add = {}, .weight = weight.view, .y = rows, .epsilon = options_.norm_epsilon},
      step.executor);
}

absl::StatusOr<PageSelection> AttentionLayer::Select(const StepContext& step) {
  const StepBatch& batch = step.batch;
  const int64_t tokens = batch.num_tokens();
  KVASIR_ASSIGN_OR_RETURN(const PageSelection selection,
                          step.activations.MakeSelection(batch, options_.num_kv_heads));
  numbers_ = batch.numbers;
  for (size_t b = 0; b < numbers_.size(); ++b) {
    // A window over the whole context is what dense means (rule R2): no path of its own.
    const QueryBlock& block = batch.blocks[b];
    if (options_.layer < batch.infos[b].dense_layers) {
      numbers_[b].window_tokens = block.first_position + block.num_rows;
    }
  }
  for (const SelectorGroup& group : batch.groups) {
    const size_t begin = static_cast<size_t>(group.begin);
    const size_t count = static_cast<size_t>(group.end - group.begin);
    const int64_t first_row = group.begin * options_.num_kv_heads;
    PageSelection rows = {.headers = selection.headers + first_row,
                          .entries = selection.entries + first_row * selection.capacity,
                          .num_rows = static_cast<int64_t>(count) * options_.num_kv_heads,
                          .capacity = selection.capacity};
    const kernels::SelectParams params = {.q = step.activations.q.Heads(tokens, options_.num_heads),
                                          .kv = step.kv,
                                          .layer = options_.layer,
                                          .blocks = std::span(batch.blocks).subspan(begin, count),
                                          .numbers = std::span(numbers_).subspan(begin, count),
                                          .scratch = &step.activations.attention_scratch};
    KVASIR_RETURN_IF_ERROR(group.served->selector->Select(params, rows, step.executor));
  }
  return selection;
}

absl::Status AttentionLayer::AttendTo(const StepContext& step, const PageSelection& selection) {
  Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  faults_.assign(static_cast<size_t>(step.kv.num_slots), 0);
  const bool measures = step.meter.Measures(options_.layer);
  const kernels::AttendParams params = {
      .q = a.q.Heads(tokens, options_.num_heads),
      .out = a.attended.Heads(tokens, options_.num_heads),
      .lse = measures ? a.lse.Rows(tokens) : TensorView(),
      .kv = step.kv,
      .layer = options_.layer,
      .scale = 1.0f / std::sqrt(static_cast<float>(options_.head_dim)),
      .blocks = step.batch.blocks,
      .selection = selection,
      .faults = std::span(faults_),
      .scratch = &a.attention_scratch};
  KVASIR_RETURN_IF_ERROR(Attend(params, step.executor));
  if (measures) KVASIR_RETURN_IF_ERROR(step.meter.Measure(params, step.executor));
  for (const QueryBlock& block : step.batch.blocks) {
    if (faults_[static_cast<size_t>(block.slot)] != 0) PoisonRows(params.out, block);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
