#include "kernels/paged/kv_tensor_maps.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kArenaAlignment = 1024;

// Finds the driver's function through the runtime, because the driver library is not linked.
absl::StatusOr<PFN_cuTensorMapEncodeTiled_v12000> FindEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                  cudaEnableDefault, &result),
                 "looking for cuTensorMapEncodeTiled"));
  if (result != cudaDriverEntryPointSuccess) {
    return absl::UnavailableError("the driver has no cuTensorMapEncodeTiled; install a newer one");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

absl::StatusOr<CUtensorMap> MakeMap(const KvLayout& layout, const KvArena& arena,
                                    int64_t box_rows) {
  if (arena.base == nullptr || reinterpret_cast<uintptr_t>(arena.base) % kArenaAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("an arena of pages must be aligned to ", kArenaAlignment, " bytes"));
  }
  KVASIR_ASSIGN_OR_RETURN(const auto encode, FindEncodeTiled());
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(layout.head_dim),
                              static_cast<cuuint64_t>(arena.bytes / layout.row_bytes())};
  const cuuint64_t row_stride[] = {static_cast<cuuint64_t>(layout.row_bytes())};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, arena.base, sizes, row_stride, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled failed with code ",
                                            static_cast<int>(result), " for an arena of ",
                                            arena.bytes, " bytes"));
  }
  return map;
}

absl::StatusOr<KvTensorMaps::Arena> MakeMaps(const KvLayout& layout, const KvArena& arena) {
  KvTensorMaps::Arena maps = {};
  KVASIR_ASSIGN_OR_RETURN(maps.pages, MakeMap(layout, arena, kPageTokens));
  KVASIR_ASSIGN_OR_RETURN(maps.pieces, MakeMap(layout, arena, kPieceTokens));
  maps.base = arena.base;
  return maps;
}

}  // namespace

absl::StatusOr<KvTensorMaps> MakeKvTensorMaps(const KvLayout& layout, const KvArena& device,
                                              const KvArena& host) {
  if (layout.dtype != DType::kBFloat16 || (layout.head_dim != 64 && layout.head_dim != 128)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the GPU serves bfloat16 KV with a head_dim of 64 or 128, not ",
                     DTypeName(layout.dtype), " with ", layout.head_dim));
  }
  KvTensorMaps maps = {};
  KVASIR_ASSIGN_OR_RETURN(maps.device, MakeMaps(layout, device));
  if (host.base == nullptr) return maps;
  KVASIR_ASSIGN_OR_RETURN(maps.host, MakeMaps(layout, host));
  return maps;
}

}  // namespace kvasir::kernels
