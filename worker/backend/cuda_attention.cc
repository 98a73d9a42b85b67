#include "worker/backend/cuda_attention.h"

#include <algorithm>

#include "kernels/attention/attend_cuda.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/count_selected_cuda.h"

namespace kvasir::worker {

using kernels::PageSelection;
using kernels::QueryBlock;
using kernels::SelectedCounts;
using kernels::TensorView;

namespace {

std::span<const QueryBlock> Blocks(const CudaStep& step, int64_t begin, int64_t end) {
  return step.table.blocks.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

}  // namespace

absl::Status CudaAttention::BeginStep(const StepInputs& inputs, const CudaStep& step,
                                      const KvArenas& arenas) {
  const kernels::KvLayout& layout = step.kv.layout;
  if (!maps_.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(maps_, kernels::MakeKvTensorMaps(layout, arenas.device, arenas.host));
  }
  const int64_t blocks = step.shape.num_blocks();
  const int64_t rows = blocks * layout.num_kv_heads;
  const int64_t group = inputs.shard.query_heads.size() / layout.num_kv_heads;
  // Of all ranks that share the KV head.
  const int64_t selecting = group * inputs.shard.kv_replicas;
  KVASIR_ASSIGN_OR_RETURN(limits_, LimitsOf(inputs.batch, step.shape, selecting));
  selection_ = {
      .headers = step.table.headers.data(), .num_rows = rows, .capacity = limits_.capacity};
  KVASIR_ASSIGN_OR_RETURN(selection_.entries,
                          Reserve<kernels::SelectionEntry>(rows * limits_.capacity, entries_));
  const int64_t workspace_bytes =
      std::max(SelectWorkspaceBytes(step.shape, limits_, step.kv),
               kernels::AttendDecodeWorkspaceBytes(layout, step.shape.num_single, group));
  KVASIR_RETURN_IF_ERROR(Reserve<std::byte>(workspace_bytes, workspace_).status());
  num_layers_ = layout.num_layers;
  KVASIR_RETURN_IF_ERROR(Reserve<SelectedCounts>(num_layers_ * rows, counts_).status());
  return Reserve<SelectedCounts>(num_layers_ * rows, host_counts_).status();
}

// Rows of `all` were filled in with the step's table.
absl::Status CudaAttention::Select(const CudaStep& step, const LayerQueries& queries,
                                   cudaStream_t stream) {
  const int64_t heads = step.kv.layout.num_kv_heads;
  const auto numbers = step.table.NumbersOfSet(step.shape.NumbersFor(queries.layer));
  for (const SelectorRange& range : step.shape.ranges) {
    if (range.served->dense) continue;
    const size_t begin = static_cast<size_t>(range.begin);
    const size_t count = static_cast<size_t>(range.end - range.begin);
    const kernels::SelectParams params = {.q = queries.q,
                                          .kv = step.kv,
                                          .layer = queries.layer,
                                          .scale = queries.scale,
                                          .blocks = Blocks(step, range.begin, range.end),
                                          .numbers = numbers.subspan(begin, count),
                                          .faults = step.faults};
    const PageSelection rows =
        selection_.Rows(range.begin * heads, (range.end - range.begin) * heads);
    KVASIR_RETURN_IF_ERROR(
        SelectOnGpu(*range.served, limits_, params, rows, workspace_.data(), stream));
  }
  const size_t rows = static_cast<size_t>(selection_.num_rows);
  SelectedCounts* const counts = counts_.As<SelectedCounts>() + queries.layer * selection_.num_rows;
  return kernels::CountSelected(Blocks(step, 0, step.shape.num_blocks()), selection_,
                                {counts, rows}, stream);
}

absl::Status CudaAttention::Attend(const CudaStep& step, const LayerQueries& queries,
                                   const TensorView& out, cudaStream_t stream) {
  const int64_t heads = step.kv.layout.num_kv_heads;
  const int64_t single = step.shape.num_single;
  const int64_t blocks = step.shape.num_blocks();
  kernels::AttendParams params = {.q = queries.q,
                                  .out = out,
                                  .lse = {},
                                  .kv = step.kv,
                                  .layer = queries.layer,
                                  .scale = queries.scale,
                                  .blocks = Blocks(step, 0, single),
                                  .selection = selection_.Rows(0, single * heads),
                                  .faults = step.faults};
  KVASIR_RETURN_IF_ERROR(kernels::AttendDecode(params, *maps_, workspace_.data(), stream));
  params.blocks = Blocks(step, single, blocks);
  params.selection = selection_.Rows(single * heads, (blocks - single) * heads);
  return kernels::AttendPrefill(params, *maps_, stream);
}

void CudaAttention::AddToShape(CudaGraphs::Shape& shape) const {
  shape.insert(shape.end(), {limits_.group, limits_.capacity, limits_.budget_tokens,
                             limits_.listed_tokens, reinterpret_cast<int64_t>(entries_.data()),
                             reinterpret_cast<int64_t>(workspace_.data()),
                             reinterpret_cast<int64_t>(counts_.data())});
}

absl::Status CudaAttention::FetchCounts(const CudaStream& stream) {
  const int64_t count = num_layers_ * selection_.num_rows;
  return stream.CopyToHost(host_counts_.data(), counts_.data(),
                           count * static_cast<int64_t>(sizeof(SelectedCounts)));
}

void CudaAttention::Report(const CudaStep& step, AttentionMeter& meter) const {
  const size_t heads = static_cast<size_t>(step.kv.layout.num_kv_heads);
  const SelectedCounts* row = host_counts_.As<SelectedCounts>();
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    for (const int64_t block : step.shape.order) {
      meter.AddCounts(block, {row, heads});
      row += heads;
    }
  }
}

}  // namespace kvasir::worker
