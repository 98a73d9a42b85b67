#include "kernels/base/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

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

}  // namespace

absl::StatusOr<CUtensorMap> MakeTensorMap(void* base, const TensorMapShape& shape) {
  static const absl::StatusOr<PFN_cuTensorMapEncodeTiled_v12000> encode = FindEncodeTiled();
  KVASIR_RETURN_IF_ERROR(encode.status());
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = (*encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape.rank, base, shape.sizes, shape.strides,
      shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return map;
  return absl::InternalError(absl::StrCat("cuTensorMapEncodeTiled failed with code ",
                                          static_cast<int>(result), " for ", shape.sizes[1],
                                          " rows of ", shape.sizes[0], " elements"));
}

}  // namespace kvasir::kernels
