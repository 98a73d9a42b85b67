// The arithmetic of RMSNorm on the GPU (rms_norm.h), for all kernels that normalize. They use the
// same order, so that a row has the same bits everywhere. NormThreads threads sum squares in turn,
// each over runs of elements. Then each warp's sums are added, then the warps' sums in order.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <type_traits>

#include "kernels/base/dtype.h"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

inline constexpr int kMaxNormThreads = 1024;

// Returns the number of threads of a CTA: whole warps, one run a thread up to the limit.
__host__ __device__ inline int NormThreads(int64_t runs) {
  const int64_t threads = (runs + kWarpThreads - 1) / kWarpThreads * kWarpThreads;
  return static_cast<int>(threads < kMaxNormThreads ? threads : kMaxNormThreads);
}

__device__ inline float AddSquare(float sum, float value) {
  return __fadd_rn(sum, __fmul_rn(value, value));
}

// Returns the sum to all lanes.
__device__ inline float SumOfLanes(float value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Returns the norm's scale from the sums of `num_warps` warps.
__device__ inline float NormScale(const float* sums, int num_warps, int64_t dim, float epsilon) {
  float sum = 0;
  for (int warp = 0; warp < num_warps; ++warp) sum = __fadd_rn(sum, sums[warp]);
  return 1.0f / sqrtf(__fadd_rn(sum / static_cast<float>(dim), epsilon));
}

// Rounds in one instruction. All NaNs become the same NaN.
template <typename T>
__device__ T RoundTo(float value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    BFloat16 rounded;
    rounded.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    return rounded;
  } else {
    return value;
  }
}

template <typename T>
__device__ T Normalized(T value, float scale, T weight) {
  const T normalized = RoundTo<T>(__fmul_rn(static_cast<float>(value), scale));
  return RoundTo<T>(__fmul_rn(static_cast<float>(weight), static_cast<float>(normalized)));
}

}  // namespace kvasir::kernels
