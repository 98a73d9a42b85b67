#include "kernels/attention/attend_cuda.h"

#include "kernels/attention/attend_launch.h"
#include "kernels/attention/row_items.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxGroup = 8;

absl::Status Check(const AttendParams& p, int64_t& group) {
  if (!p.terminations.empty()) {
    return absl::UnimplementedError(
        "attend on the GPU reads every page that was selected; it has no terminators: serve "
        "policies with art by the CPU backend");
  }
  if (p.grouped.on()) {
    return absl::UnimplementedError(
        "attend on the GPU reads keys at the positions they are cached at, not at grouped ones: "
        "serve without --position-extension=self_extend, or by the CPU backend");
  }
  const KvLayout& layout = p.kv.layout;
  const int64_t rows = static_cast<int64_t>(p.blocks.size()) * layout.num_kv_heads;
  ShapeCheck check("attend on the GPU");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim}, DType::kBFloat16)
      .Match("out", p.out, {"tokens", "heads", layout.head_dim}, DType::kBFloat16)
      .Require(layout.dtype == DType::kBFloat16, "the KV must be bfloat16")
      .Require(p.rope == nullptr, "keys must be cached rotated")
      .Require(layout.head_dim == 64 || layout.head_dim == 128, "head_dim must be 64 or 128")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.selection.num_rows == rows, "selection.num_rows must be blocks x KV heads")
      .Require(static_cast<int64_t>(p.faults.size()) == p.kv.num_slots,
               "faults must be [num_slots]");
  if (!p.lse.empty()) check.Match("lse", p.lse, {"tokens", "heads"}, DType::kFloat32);
  KVASIR_RETURN_IF_ERROR(check.status());
  group = layout.num_kv_heads > 0 ? check.dim("heads") / layout.num_kv_heads : 0;
  check.Require(group >= 1 && group <= kMaxGroup && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be 1 to 8 times the KV heads");
  return check.status();
}

AttendLaunch MakeLaunch(const AttendParams& p, int64_t group) {
  return {.q = p.q.As<const __nv_bfloat16>(),
          .out = p.out.As<__nv_bfloat16>(),
          .lse = p.lse.empty() ? nullptr : p.lse.As<float>(),
          .kv = p.kv,
          .layer = p.layer,
          .scale = p.scale,
          .blocks = p.blocks.data(),
          .headers = p.selection.headers,
          .entries = p.selection.entries,
          .capacity = p.selection.capacity,
          .num_rows = p.selection.num_rows,
          .group = group,
          .faults = p.faults.data()};
}

}  // namespace

int64_t AttendDecodeWorkspaceBytes(const KvLayout& layout, int64_t blocks, int64_t group) {
  return blocks * layout.num_kv_heads * MaxDecodeUnits(layout.num_kv_heads) * group *
         (layout.head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

absl::Status AttendDecode(const AttendParams& params, const KvTensorMaps& maps,
                          std::byte* workspace, cudaStream_t stream) {
  int64_t group = 0;
  KVASIR_RETURN_IF_ERROR(Check(params, group));
  if (params.blocks.empty()) return absl::OkStatus();
  int device = 0;
  int processors = 0;
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                 "asking for the device's multiprocessors"));
  return CudaStatus(LaunchAttendDecode(MakeLaunch(params, group), maps,
                                       reinterpret_cast<float*>(workspace), processors, stream),
                    "launching decode attention");
}

absl::Status AttendPrefill(const AttendParams& params, const KvTensorMaps& maps,
                           cudaStream_t stream) {
  int64_t group = 0;
  KVASIR_RETURN_IF_ERROR(Check(params, group));
  if (params.blocks.empty()) return absl::OkStatus();
  return CudaStatus(LaunchAttendPrefill(MakeLaunch(params, group), maps, stream),
                    "launching prefill attention");
}

}  // namespace kvasir::kernels
