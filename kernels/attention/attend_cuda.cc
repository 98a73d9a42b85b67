#include "kernels/attention/attend_cuda.h"

#include <algorithm>

#include "kernels/attention/attend_launch.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/base/shape_check.h"
#include "kernels/paged/row_items.h"
#include "kernels/plans/plan_log.h"

namespace kvasir::kernels {
namespace {

absl::StatusOr<int64_t> CheckedGroup(const CudaAttendParams& p) {
  const KvLayout& layout = p.kv.layout;
  const int64_t rows = static_cast<int64_t>(p.tiles.size()) * layout.num_kv_heads;
  ShapeCheck check("attend on the GPU");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim}, DType::kBFloat16)
      .Match("out", p.out, {"tokens", "heads", layout.head_dim}, DType::kBFloat16)
      .Require(layout.element_dtype() == DType::kBFloat16,
               "the KV must be bfloat16, fp8_e4m3 or int8")
      .Require(!p.grouped.on() || (p.device_rope.on() && p.grouped.window > 0),
               "grouped positions need device_rope, and a window of at least 1")
      .Require(p.window_tokens == 0 || (p.window_tokens > 0 && !p.grouped.on()),
               "window_tokens needs native or compact positions")
      .Require(layout.head_dim == 64 || layout.head_dim == 128, "head_dim must be 64 or 128")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.selection.num_rows == rows, "selection.num_rows must be blocks x KV heads")
      .Require(static_cast<int64_t>(p.faults.size()) == p.kv.num_slots,
               "faults must be [num_slots]")
      .Require(p.device_counts.empty() || static_cast<int64_t>(p.device_counts.size()) == rows,
               "device_counts must be one per row");
  if (!p.lse.empty()) check.Match("lse", p.lse, {"tokens", "heads"}, DType::kFloat32);
  KVASIR_RETURN_IF_ERROR(check.status());
  const int64_t group = layout.num_kv_heads > 0 ? check.dim("heads") / layout.num_kv_heads : 0;
  check.Require(group >= 1 && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  return group;
}

}  // namespace

absl::StatusOr<AttendLaunch> MakeAttendLaunch(const CudaAttendParams& p) {
  KVASIR_ASSIGN_OR_RETURN(const int64_t group, CheckedGroup(p));
  return AttendLaunch{.q = p.q.As<const __nv_bfloat16>(),
                      .out = p.out.As<__nv_bfloat16>(),
                      .lse = p.lse.empty() ? nullptr : p.lse.As<float>(),
                      .kv = p.kv,
                      .token_bytes = p.kv.layout.token_bytes(),
                      .layer = p.layer,
                      .scale = p.scale,
                      .tiles = p.tiles.data(),
                      .headers = p.selection.headers,
                      .entries = p.selection.entries,
                      .capacity = p.selection.capacity,
                      .num_rows = p.selection.num_rows,
                      .group = group,
                      .faults = p.faults.data(),
                      .counts = p.device_counts.data(),
                      .rope = p.device_rope,
                      .grouped = p.grouped,
                      .window_tokens = p.window_tokens};
}

AttendShape ShapeOf(const AttendLaunch& p) {
  return {.head_dim = p.kv.layout.head_dim,
          .rows = p.num_rows,
          .group = p.group,
          .placement = p.grouped.on() ? Placement::kGrouped
                       : p.rope.on()  ? Placement::kCompact
                                      : Placement::kCached,
          .has_codes = IsQuantized(p.kv.layout.dtype)};
}

int64_t AttendDecodeWorkspaceBytes(const KvLayout& layout, int64_t blocks, int64_t group) {
  return blocks * layout.num_kv_heads * MaxDecodeUnits(layout.num_kv_heads) * group *
         (kPartialHead + layout.head_dim) * static_cast<int64_t>(sizeof(float));
}

absl::Status AttendDecode(const CudaAttendParams& params, const KvTensorMaps& maps,
                          std::byte* workspace, std::span<uint32_t> arrivals, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const AttendLaunch launch, MakeAttendLaunch(params));
  if (params.tiles.empty()) return absl::OkStatus();
  if (std::ssize(arrivals) < launch.num_rows) {
    return absl::InvalidArgumentError("attend on the GPU: arrivals must be one per row");
  }
  int processors = 0;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(CountMultiprocessors(processors), "counting the device's multiprocessors"));
  const AttendKernelPlan plan = PlanAttendDecode(ShapeOf(launch), processors);
  TellPlan("attention", plan);
  return CudaStatus(
      LaunchAttendDecode(
          launch, plan, maps,
          {.partials = reinterpret_cast<float*>(workspace), .arrivals = arrivals.data()}, stream),
      "launching decode attention");
}

absl::Status AttendPrefill(const CudaAttendParams& params, const KvTensorMaps& maps,
                           cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const AttendLaunch launch, MakeAttendLaunch(params));
  if (params.tiles.empty()) return absl::OkStatus();
  const AttendKernelPlan plan = PlanAttendPrefill(ShapeOf(launch));
  TellPlan("attention", plan);
  return CudaStatus(LaunchAttendPrefill(launch, plan, maps, stream), "launching prefill attention");
}

absl::StatusOr<PreparedMemory> PreparedMemory::Create(const KvLayout& layout, int64_t max_tokens) {
  PreparedMemory memory;
  memory.bytes = PreparedBytes(layout, max_tokens);
  KVASIR_ASSIGN_OR_RETURN(memory.buffer, DeviceBuffer::Allocate(memory.bytes + kArenaAlignment));
  const auto begin = reinterpret_cast<uintptr_t>(memory.buffer.data());
  memory.pages = memory.buffer.data() + (0 - begin) % kArenaAlignment;
  KVASIR_ASSIGN_OR_RETURN(
      memory.maps,
      MakeKvTensorMaps(PreparedLayout(layout), {.base = memory.pages, .bytes = memory.bytes}, {}));
  return memory;
}

absl::Status AttendPrepared(const CudaAttendParams& params, PreparedPages pages,
                            const PreparedMemory& memory, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const AttendLaunch launch, MakeAttendLaunch(params));
  if (launch.grouped.on()) {
    return absl::InvalidArgumentError("attend on the GPU: prepared pages have one position a key");
  }
  const auto heads = static_cast<int32_t>(params.kv.layout.num_kv_heads);
  const int32_t heads_of_pass = pages.num_heads;
  for (; pages.first_head < heads; pages.first_head += heads_of_pass) {
    pages.num_heads = std::min(heads_of_pass, heads - pages.first_head);
    const AttendKernelPlan plan = PlanAttendPrepared(ShapeOf(launch), heads, pages.num_heads);
    TellPlan("attention", plan);
    KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchPreparePages(launch, pages, memory.pages, stream),
                                      "launching the preparation of pages"));
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(LaunchAttendPrepared(launch, plan, pages, memory.maps, stream),
                   "launching attention over prepared pages"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
