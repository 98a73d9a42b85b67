#include "worker/backend/cuda/cuda_attention.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/paged/count_selected_cuda.h"

namespace kvasir::worker {

using kernels::CudaTerminator;
using kernels::PageSelection;
using kernels::QueryTile;
using kernels::SelectedCounts;
using kernels::TensorView;

namespace {

std::span<const QueryTile> Blocks(const CudaStep& step, int64_t begin, int64_t end) {
  return step.table.tiles.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

// Returns the terminator that may end the rows of a range early; null: none.
const CudaTerminator* TerminatorOf(const SelectorRange& range) {
  return range.served->on_gpu.terminator.get();
}

// Returns the bytes that any terminator of the step needs for `tiles` query tiles.
int64_t TerminatorWorkspaceBytes(const CudaStep& step, int64_t tiles, int64_t group) {
  int64_t bytes = 0;
  for (const SelectorRange& range : step.shape.ranges) {
    const CudaTerminator* const terminator = TerminatorOf(range);
    if (terminator == nullptr) continue;
    bytes = std::max(bytes, terminator->WorkspaceBytes(step.kv, tiles, group));
  }
  return bytes;
}

std::span<const kernels::DeviceSelectionMemory> MemoriesOf(const CudaStep& step,
                                                           const SelectorRange& range) {
  if (range.served->reuse == nullptr) return {};
  return step.table.memories.subspan(static_cast<size_t>(range.begin),
                                     static_cast<size_t>(range.end - range.begin));
}

}  // namespace

absl::Status CudaAttention::BeginStep(const StepInputs& inputs, const CudaStep& step,
                                      const KvArenas& arenas, const CudaStream& stream,
                                      WaitForDevice wait) {
  const kernels::KvLayout& layout = step.kv.layout;
  if (step.kv.on_disk != nullptr) on_disk_.mailbox->ServeFrom(*step.kv.on_disk);
  if (!maps_.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(maps_, kernels::MakeKvTensorMaps(layout, arenas.device, arenas.host));
  }
  const int64_t blocks = step.shape.num_tiles();
  const int64_t rows = blocks * layout.num_kv_heads;
  const int64_t group = inputs.shard.query_heads.size() / layout.num_kv_heads;
  // Query heads of all ranks that share the KV head.
  const int64_t selecting = group * inputs.shard.kv_replicas;
  KVASIR_ASSIGN_OR_RETURN(limits_, LimitsOf(inputs.batch, step.shape, selecting, step.kv));
  select_ranks_ = CudaSelectRanks(step.ranks, inputs.shard);
  part_ = select_ranks_.PartOf(inputs.shard);
  limits_.heads_of_layer = part_.num_heads;
  KVASIR_RETURN_IF_ERROR(ReservePositions(inputs, step, stream, wait));
  selection_ = {
      .headers = step.table.headers.data(), .num_rows = rows, .capacity = limits_.select.capacity};
  KVASIR_ASSIGN_OR_RETURN(selection_.entries, Reserve<kernels::SelectionEntry>(
                                                  rows * limits_.select.capacity, entries_, wait));
  windows_ = inputs.batch.windows;
  if (windows_.served != nullptr) {
    window_selection_ = selection_;
    KVASIR_ASSIGN_OR_RETURN(window_selection_.headers,
                            Reserve<kernels::SelectionHeader>(rows, window_headers_, wait));
  }
  PlanPrepared(inputs, step);
  KVASIR_RETURN_IF_ERROR(ReserveArrivals(rows, stream, wait));
  const int64_t single = step.shape.num_single;
  const int64_t workspace_bytes =
      std::max({SelectWorkspaceBytes(step.shape, limits_, step.kv),
                kernels::AttendDecodeWorkspaceBytes(layout, single, group),
                TerminatorWorkspaceBytes(step, single, group)});
  return Reserve<std::byte>(workspace_bytes, workspace_, wait).status();
}

absl::Status CudaAttention::ReserveArrivals(int64_t rows, const CudaStream& stream,
                                            WaitForDevice wait) {
  const int64_t bytes = arrivals_.size_bytes();
  KVASIR_RETURN_IF_ERROR(Reserve<uint32_t>(rows, arrivals_, wait).status());
  if (arrivals_.size_bytes() == bytes) return absl::OkStatus();
  return stream.Clear(arrivals_.data(), arrivals_.size_bytes());
}

absl::Status CudaAttention::ReservePositions(const StepInputs& inputs, const CudaStep& step,
                                             const CudaStream& stream, WaitForDevice wait) {
  rope_ = {};
  if (step.positions == nullptr) return absl::OkStatus();
  int64_t end = limits_.positions;
  if (step.grouped.on()) end = std::max(end, kernels::EndOfPositions(inputs.batch.tiles));
  if (end > step.positions->view().end) KVASIR_RETURN_IF_ERROR(wait());
  KVASIR_RETURN_IF_ERROR(step.positions->Reserve(end, stream.get()));
  rope_ = step.positions->view();
  const kernels::KvLayout& layout = step.kv.layout;
  const int64_t elements =
      inputs.batch.num_tokens() * layout.num_kv_heads * limits_.select.group * layout.head_dim;
  return Reserve<kernels::BFloat16>(elements, placed_queries_, wait).status();
}

void CudaAttention::PlanPrepared(const StepInputs& inputs, const CudaStep& step) {
  prepared_.clear();
  for (const SelectorRange& range : step.shape.ranges) {
    std::optional<kernels::PreparedPages>& plan = prepared_.emplace_back();
    if (step.prepared == nullptr || !range.served->dense) continue;
    std::vector<QueryTile> tiles;
    for (int64_t i = std::max(range.begin, step.shape.num_single); i < range.end; ++i) {
      const int64_t tile = step.shape.order[static_cast<size_t>(i)];
      tiles.push_back(inputs.batch.tiles[static_cast<size_t>(tile)]);
    }
    plan = kernels::PlanPreparedPages(tiles, step.kv.layout, step.prepared->bytes);
  }
}

std::span<const SelectorRange> CudaAttention::RangesOf(const CudaStep& step, int64_t layer,
                                                       SelectorRange& window) const {
  if (WindowTokens(layer) == 0) return step.shape.ranges;
  window = {.served = windows_.served, .begin = 0, .end = step.shape.num_tiles()};
  return std::span(&window, 1);
}

// Rows of `all` were already written with the step's table.
absl::Status CudaAttention::Select(const CudaStep& step, const LayerQueries& queries,
                                   cudaStream_t stream) {
  const int64_t heads = step.kv.layout.num_kv_heads;
  const auto numbers = step.table.NumbersOfSet(step.shape.NumbersFor(queries.layer));
  const TensorView& q = queries.q;
  const SelectWorkspace memory = {
      .workspace = workspace_.data(),
      .placed_queries = TensorView(placed_queries_.data(), q.dtype(),
                                   {q.dim(0), q.dim(1), q.dim(2)}, kernels::Device::kCuda)};
  const auto select = [&](const SelectorRange& range, int64_t most_rows) -> absl::Status {
    if (range.begin >= range.end) return absl::OkStatus();
    const size_t begin = static_cast<size_t>(range.begin);
    const size_t count = static_cast<size_t>(range.end - range.begin);
    kernels::CudaSelectParams params = {{.q = queries.q,
                                         .kv = step.kv,
                                         .layer = queries.layer,
                                         .scale = queries.scale,
                                         .tiles = Blocks(step, range.begin, range.end),
                                         .numbers = numbers.subspan(begin, count),
                                         .faults = step.results.faults,
                                         .rotation = step.rotation}};
    params.device_rope = rope_;
    params.device_memories = MemoriesOf(step, range);
    params.most_rows = most_rows;
    params.part = part_;
    const PageSelection rows =
        SelectionOf(queries.layer).Rows(range.begin * heads, (range.end - range.begin) * heads);
    return SelectOnGpu(*range.served, limits_, params, rows, memory, stream);
  };
  // Rows of one query apart, so that it is the same kernels that serve them whatever else there is.
  const int64_t num_single = step.shape.num_single;
  SelectorRange window;
  for (const SelectorRange& range : RangesOf(step, queries.layer, window)) {
    if (range.served->dense) continue;
    KVASIR_RETURN_IF_ERROR(select(
        {.served = range.served, .begin = range.begin, .end = std::min(range.end, num_single)},
        /*most_rows=*/1));
    KVASIR_RETURN_IF_ERROR(select(
        {.served = range.served, .begin = std::max(range.begin, num_single), .end = range.end},
        kernels::kPageTokens));
  }
  return absl::OkStatus();
}

std::span<SelectedCounts> CudaAttention::Counts(const CudaStep& step, int64_t layer, int64_t begin,
                                                int64_t end) const {
  const int64_t heads = step.kv.layout.num_kv_heads;
  return step.results.counts.subspan(
      static_cast<size_t>(layer * selection_.num_rows + begin * heads),
      static_cast<size_t>((end - begin) * heads));
}

kernels::CudaAttendParams CudaAttention::ParamsOf(const CudaStep& step, const LayerQueries& queries,
                                                  const TensorView& out, int64_t begin,
                                                  int64_t end) const {
  const int64_t heads = step.kv.layout.num_kv_heads;
  kernels::CudaAttendParams params = {
      {.q = queries.q,
       .out = out,
       .lse = {},
       .kv = step.kv,
       .layer = queries.layer,
       .scale = queries.scale,
       .tiles = Blocks(step, begin, end),
       .selection = SelectionOf(queries.layer).Rows(begin * heads, (end - begin) * heads),
       .faults = step.results.faults,
       .grouped = step.grouped,
       .window_tokens = WindowTokens(queries.layer)}};
  params.device_rope = rope_;
  params.device_counts = Counts(step, queries.layer, begin, end);
  return params;
}

absl::Status CudaAttention::Attend(const CudaStep& step, const LayerQueries& queries,
                                   const TensorView& out, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(BringPages(step, queries.layer, stream));
  const auto params = [&](int64_t begin, int64_t end) {
    return ParamsOf(step, queries, out, begin, end);
  };
  // Consecutive ranges of one query without a terminator share a launch.
  int64_t begin = 0;
  SelectorRange window;
  for (const SelectorRange& range : RangesOf(step, queries.layer, window)) {
    const CudaTerminator* const terminator = TerminatorOf(range);
    if (terminator == nullptr || range.begin >= step.shape.num_single) continue;
    const int64_t end = std::min(range.end, step.shape.num_single);
    KVASIR_RETURN_IF_ERROR(AttendDecode(params(begin, range.begin), stream));
    KVASIR_RETURN_IF_ERROR(
        AttendEnding(step, *terminator, params(range.begin, end), range.begin, stream));
    begin = end;
  }
  KVASIR_RETURN_IF_ERROR(AttendDecode(params(begin, step.shape.num_single), stream));
  return AttendPrefill(step, queries, out, stream);
}

absl::Status CudaAttention::AttendPrefill(const CudaStep& step, const LayerQueries& queries,
                                          const TensorView& out, cudaStream_t stream) {
  const int64_t tiles = step.shape.num_tiles();
  const auto params = [&](int64_t begin, int64_t end) {
    return ParamsOf(step, queries, out, begin, end);
  };
  int64_t begin = step.shape.num_single;
  const kernels::CudaAttendParams all = params(begin, tiles);
  KVASIR_RETURN_IF_ERROR(
      kernels::CountSelected(all.tiles, all.selection, all.device_counts, stream));
  // Consecutive ranges whose pages are read where they lie share a launch.
  const std::span<const SelectorRange> ranges = step.shape.ranges;
  for (size_t i = 0; i < ranges.size() && WindowTokens(queries.layer) == 0; ++i) {
    if (!prepared_[i].has_value()) continue;
    const int64_t first = std::max(ranges[i].begin, step.shape.num_single);
    KVASIR_RETURN_IF_ERROR(kernels::AttendPrefill(params(begin, first), *maps_, stream));
    KVASIR_RETURN_IF_ERROR(kernels::AttendPrepared(params(first, ranges[i].end), *prepared_[i],
                                                   *step.prepared, stream));
    begin = ranges[i].end;
  }
  return kernels::AttendPrefill(params(begin, tiles), *maps_, stream);
}

absl::Status CudaAttention::BringPages(const CudaStep& step, int64_t layer,
                                       cudaStream_t stream) const {
  if (step.kv.on_disk == nullptr) return absl::OkStatus();
  return kernels::BringPages(on_disk_.state, on_disk_.mailbox->view(),
                             {.kv = step.kv,
                              .layer = layer,
                              .tiles = Blocks(step, 0, step.shape.num_tiles()),
                              .selection = SelectionOf(layer)},
                             stream);
}

absl::Status CudaAttention::AttendDecode(const kernels::CudaAttendParams& params,
                                         cudaStream_t stream) {
  return kernels::AttendDecode(params, *maps_, workspace_.data(),
                               {arrivals_.As<uint32_t>(), static_cast<size_t>(selection_.num_rows)},
                               stream);
}

absl::Status CudaAttention::AttendEnding(const CudaStep& step, const CudaTerminator& terminator,
                                         const kernels::CudaAttendParams& params,
                                         int64_t first_block, cudaStream_t stream) {
  const auto numbers = step.table.NumbersOfSet(step.shape.NumbersFor(params.layer));
  return terminator.Attend(params,
                           numbers.subspan(static_cast<size_t>(first_block), params.tiles.size()),
                           *maps_, workspace_.data(), stream);
}

void CudaAttention::AddTo(GraphKey& key) const {
  key.AddAll("bounds", limits_.select);
  key.Add("entries", entries_.data());
  key.Add("window_headers", window_headers_.data());
  key.Add("workspace", workspace_.data());
  key.Add("arrivals", arrivals_.data());
  key.Add("placed_queries", placed_queries_.data());
  key.Add("rope.cos", rope_.cos);
  key.Add("rope.sin", rope_.sin);
}

void CudaAttention::Report(const CudaStep& step, std::span<const SelectedCounts> counts,
                           AttentionMeter& meter) {
  const size_t heads = static_cast<size_t>(step.kv.layout.num_kv_heads);
  for (int64_t layer = 0; layer < step.kv.layout.num_layers; ++layer) {
    for (const int64_t block : step.shape.order) {
      meter.AddCounts(layer, block, counts.first(heads));
      counts = counts.subspan(heads);
    }
  }
}

}  // namespace kvasir::worker
