#include "worker/model/attention_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "kernels/attention/attend.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/paged/append.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "kernels/sparse/select_common.h"
#include "worker/model/collective_ranks.h"

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

// Of the step's queries; none where keys are cached un-rotated.
kernels::QueryRotation RotationOf(const StepContext& step) {
  if (step.compact_rope != nullptr) return {};
  return {.cos = step.rope.cos(), .sin = step.rope.sin()};
}

// As a gather takes it, which moves bits: two bfloat16 go as one float. REQUIRES: a multiple of
// four bytes.
absl::Span<float> AsFloats(const TensorView& tensor) {
  return {tensor.As<float>(), static_cast<size_t>(tensor.size_bytes()) / sizeof(float)};
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
  const int64_t q_rows = options.shard.query_heads.size() * options.head_dim;
  const int64_t kv_rows = options.shard.kv_heads.size() * options.head_dim;
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
  faults_.assign(static_cast<size_t>(step.kv.num_slots), 0);
  KVASIR_RETURN_IF_ERROR(ProjectAndAppend(step));
  KVASIR_ASSIGN_OR_RETURN(const PageSelection selection, Select(step));
  MakeTerminations(step.batch);
  KVASIR_RETURN_IF_ERROR(AttendTo(step, selection));
  // Ranks that share a KV head select alike: its pages are counted once.
  if (options_.shard.replica() == 0) {
    step.meter.Count(selection, unread_, step.kv, options_.layer);
  }
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
  KVASIR_RETURN_IF_ERROR(Normalize(step, q_norm_, a.q, num_heads()));
  KVASIR_RETURN_IF_ERROR(Normalize(step, k_norm_, a.k, num_kv_heads()));
  const TensorView k = a.k.Heads(tokens, num_kv_heads());
  if (step.compact_rope == nullptr) {
    KVASIR_RETURN_IF_ERROR(ApplyRope(step.rope, a.q.Heads(tokens, num_heads()), executor));
    KVASIR_RETURN_IF_ERROR(ApplyRope(step.rope, k, executor));
  }
  return kernels::AppendKv({.k = k,
                            .v = a.v.Heads(tokens, num_kv_heads()),
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

// Of this layer.
void AttentionLayer::PlaceNumbers(const StepBatch& batch) {
  numbers_ = batch.numbers;
  for (size_t b = 0; b < numbers_.size(); ++b) {
    const BlockInfo& info = batch.infos[b];
    for (const LayerBudget& layers : info.layer_budgets) {
      if (options_.layer < layers.begin || options_.layer >= layers.end) continue;
      numbers_[b].budget_tokens = layers.budget_tokens;
    }
    // A window over the whole context is what dense means (rule R2): no path of its own.
    const QueryBlock& block = batch.blocks[b];
    if (options_.layer < info.dense_layers) {
      numbers_[b].window_tokens = block.first_position + block.num_rows;
    }
  }
}

absl::StatusOr<PageSelection> AttentionLayer::Select(const StepContext& step) {
  const StepBatch& batch = step.batch;
  KVASIR_ASSIGN_OR_RETURN(const TensorView queries, SelectionQueries(step));
  PlaceNumbers(batch);
  KVASIR_ASSIGN_OR_RETURN(const PageSelection selection,
                          step.activations.MakeSelection(batch, numbers_, num_kv_heads()));
  CollectiveRanks ranks(options_.shard, step.collective);
  for (const SelectorGroup& group : batch.groups) {
    const size_t begin = static_cast<size_t>(group.begin);
    const size_t count = static_cast<size_t>(group.end - group.begin);
    PageSelection rows =
        selection.Rows(group.begin * num_kv_heads(), (group.end - group.begin) * num_kv_heads());
    const kernels::SelectParams params = {.q = queries,
                                          .kv = step.kv,
                                          .layer = options_.layer,
                                          .scale = LogitScale(),
                                          .blocks = std::span(batch.blocks).subspan(begin, count),
                                          .numbers = std::span(numbers_).subspan(begin, count),
                                          .faults = std::span(faults_),
                                          .scratch = &step.activations.attention_scratch,
                                          .rope = step.compact_rope,
                                          .rotation = RotationOf(step),
                                          .memories = MemoriesOf(batch, group),
                                          .ranks = &ranks};
    const ServedSelector& served = *group.served;
    KVASIR_RETURN_IF_ERROR(
        served.reuse == nullptr
            ? served.selector->Select(params, rows, step.executor)
            : SelectReusing(*served.selector, *served.reuse, params, rows, step.executor));
    if (step.compact_rope != nullptr) AssignPositions(rows);
    if (served.pruner != nullptr) {
      kernels::SelectParams anew = params;  // pruned is what serves again, too
      anew.memories = {};
      KVASIR_RETURN_IF_ERROR(served.pruner->Prune(anew, rows, step.executor));
    }
    KVASIR_RETURN_IF_ERROR(KeepContract(step, group, params, rows));
  }
  return selection;
}

absl::Status AttentionLayer::KeepContract(const StepContext& step, const SelectorGroup& group,
                                          const kernels::SelectParams& params,
                                          PageSelection& rows) {
  kernels::ContractKeeper& keeper = step.activations.contract_keeper;
  KVASIR_RETURN_IF_ERROR(
      keeper.Keep({.selector = *group.served->selector, .pruner = group.served->pruner.get()},
                  params, rows, step.executor));
  // Ranks that share a KV head find the same.
  if (options_.shard.replica() == 0) step.meter.CountContract(group, keeper);
  return absl::OkStatus();
}

std::span<kernels::RowMemory* const> AttentionLayer::MemoriesOf(const StepBatch& batch,
                                                                const SelectorGroup& group) {
  if (group.served->reuse == nullptr) return {};
  memories_.clear();
  for (int64_t b = group.begin; b < group.end; ++b) {
    kernels::SelectionMemory* memory = batch.infos[static_cast<size_t>(b)].memory;
    for (int64_t head = 0; head < num_kv_heads(); ++head) {
      memories_.push_back(memory == nullptr ? nullptr : &memory->row(options_.layer, head));
    }
  }
  return memories_;
}

void AttentionLayer::MakeTerminations(const StepBatch& batch) {
  terminations_.clear();
  unread_.clear();
  const bool any = std::any_of(batch.groups.begin(), batch.groups.end(), [](const auto& group) {
    return group.served->terminator != nullptr;
  });
  if (!any) return;
  for (const SelectorGroup& group : batch.groups) {
    for (int64_t b = group.begin; b < group.end; ++b) {
      terminations_.push_back(kernels::MakeTermination(group.served->terminator.get(),
                                                       batch.blocks[static_cast<size_t>(b)],
                                                       numbers_[static_cast<size_t>(b)]));
    }
  }
  unread_.resize(terminations_.size() * static_cast<size_t>(num_kv_heads()));
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
  const TensorView own = a.q.Rows(tokens);
  const TensorView gathered = a.gathered_q.Rows(shard.num_ranks * tokens);
  KVASIR_RETURN_IF_ERROR(step.collective.AllGather(AsFloats(own), AsFloats(gathered)));
  const TensorView group = a.group_q.Rows(tokens);
  const int64_t row_bytes = own.size_bytes() / tokens;
  const int64_t first_rank = shard.rank - shard.replica();
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t replica = 0; replica < shard.kv_replicas; ++replica) {
      const int64_t from = (first_rank + replica) * tokens + token;
      const int64_t to = token * shard.kv_replicas + replica;
      std::memcpy(group.As<std::byte>() + to * row_bytes,
                  gathered.As<const std::byte>() + from * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
  return a.group_q.Heads(tokens, shard.kv_replicas * num_heads());
}

absl::Status AttentionLayer::AttendTo(const StepContext& step, const PageSelection& selection) {
  Activations& a = step.activations;
  const int64_t tokens = step.batch.num_tokens();
  // Densely attended to, a context beyond the trained window is no measure of anything.
  const bool measures = step.compact_rope == nullptr && step.meter.Measures(options_.layer);
  const kernels::AttendParams params = {.q = a.q.Heads(tokens, num_heads()),
                                        .out = a.attended.Heads(tokens, num_heads()),
                                        .lse = measures ? a.lse.Rows(tokens) : TensorView(),
                                        .kv = step.kv,
                                        .layer = options_.layer,
                                        .scale = LogitScale(),
                                        .blocks = step.batch.blocks,
                                        .selection = selection,
                                        .faults = std::span(faults_),
                                        .scratch = &a.attention_scratch,
                                        .rope = step.compact_rope,
                                        .terminations = terminations_,
                                        .unread = std::span(unread_)};
  KVASIR_RETURN_IF_ERROR(Attend(params, step.executor));
  if (measures) KVASIR_RETURN_IF_ERROR(step.meter.Measure(params, step.executor));
  for (const QueryBlock& block : step.batch.blocks) {
    if (faults_[static_cast<size_t>(block.slot)] != 0) PoisonRows(params.out, block);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
