// The element-wise ops on the GPU. They are limited by memory, so rows are read and written in runs
// of 16 bytes where they are aligned. Compiled without fused multiply-add, so that results without
// sums have the CPU's bits.
#include <algorithm>
#include <initializer_list>

#include "kernels/base/overlapped_launch.h"
#include "kernels/base/warp.cuh"
#include "kernels/dense/elementwise_launch.h"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/dense/silu_mul.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kThreads = 256;
constexpr int kRunBytes = 16;

// Elements that are read and written together.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Run {
  T values[kCount];
};

bool IsAligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kRunBytes != 0) return false;
  }
  return true;
}

// Returns the number of threads for `items` items of a row: whole warps, one item a thread up to
// the limit.
unsigned ThreadsFor(int64_t items) {
  const int64_t threads = (items + kWarpThreads - 1) / kWarpThreads * kWarpThreads;
  return static_cast<unsigned>(threads < kMaxThreads ? threads : kMaxThreads);
}

// Returns launch(a run of the tensors' dtype and alignment).
template <typename Launch>
cudaError_t ForRuns(DType dtype, int64_t dim, bool aligned, const Launch& launch) {
  const bool in_runs = aligned && dim * static_cast<int64_t>(DTypeSize(dtype)) % kRunBytes == 0;
  if (dtype == DType::kFloat32) {
    return in_runs ? launch(Run<float, 4>()) : launch(Run<float, 1>());
  }
  return in_runs ? launch(Run<BFloat16, 8>()) : launch(Run<BFloat16, 1>());
}

// One CTA a row. The weights of a thread's first run are read before the kernel ahead has ended,
// and the run itself stays in registers, so that rows of usual sizes are read once.
template <typename T, int kCount, bool kAdds, bool kNorms>
__global__ void SumNormKernel(const __grid_constant__ SumNormLaunch p) {
  __shared__ float sums[kMaxNormThreads / kWarpThreads];
  using Elements = Run<T, kCount>;
  const int64_t runs = p.dim / kCount;
  const int64_t begin = blockIdx.x * runs;
  const int64_t first = threadIdx.x;
  const auto* weight = static_cast<const Elements*>(p.weight);
  Elements first_sum = {}, first_weight = {};
  if (kNorms && first < runs) first_weight = weight[first];
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  Elements* const x = static_cast<Elements*>(p.sum) + begin;
  float squares = 0;
  for (int64_t i = first; i < runs; i += blockDim.x) {
    Elements values = x[i];
    if constexpr (kAdds) {
      const Elements added = static_cast<const Elements*>(p.added)[begin + i];
      for (int j = 0; j < kCount; ++j) {
        values.values[j] =
            T(static_cast<float>(values.values[j]) + static_cast<float>(added.values[j]));
      }
      x[i] = values;
    }
    if constexpr (kNorms) {
      if (i == first) first_sum = values;
      for (const T value : values.values) squares = AddSquare(squares, static_cast<float>(value));
    }
  }
  if constexpr (kNorms) {
    squares = SumOfLanes(squares);
    if (threadIdx.x % kWarpThreads == 0) sums[threadIdx.x / kWarpThreads] = squares;
    __syncthreads();
    const float scale =
        NormScale(sums, static_cast<int>(blockDim.x) / kWarpThreads, p.dim, p.epsilon);
    for (int64_t i = first; i < runs; i += blockDim.x) {
      Elements values = i == first ? first_sum : x[i];
      const Elements factors = i == first ? first_weight : weight[i];
      for (int j = 0; j < kCount; ++j) {
        values.values[j] = Normalized(values.values[j], scale, factors.values[j]);
      }
      static_cast<Elements*>(p.normed)[begin + i] = values;
    }
  }
}

template <typename T, int kCount>
__global__ void SiluMulKernel(const SiluMulRows rows) {
  using Elements = Run<T, kCount>;
  const int64_t runs = rows.dim / kCount;
  const int64_t row = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  if (i >= runs) return;
  const Elements* gate_up = static_cast<const Elements*>(rows.gate_up) + row * 2 * runs;
  const Elements gate = gate_up[i];
  const Elements up = gate_up[runs + i];
  Elements y;
  for (int j = 0; j < kCount; ++j) {
    y.values[j] = SiluMulOf(gate.values[j], up.values[j]);
  }
  static_cast<Elements*>(rows.y)[row * runs + i] = y;
}

// One CTA a token.
__global__ void RopeAnglesKernel(const AnglesLaunch p) {
  const int64_t token = blockIdx.x;
  const auto position = static_cast<double>(p.positions[token]);
  for (int64_t i = threadIdx.x; i < p.half_dim; i += blockDim.x) {
    double sine = 0;
    double cosine = 0;
    sincos(position * p.inv_freq[i], &sine, &cosine);
    p.cos[token * p.half_dim + i] = static_cast<float>(cosine * p.attention_scaling);
    p.sin[token * p.half_dim + i] = static_cast<float>(sine * p.attention_scaling);
  }
}

// One CTA a row.
template <typename Unit>
__global__ void GatherKernel(const GatherLaunch p) {
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t id = p.ids[blockIdx.x];
  Unit* y = static_cast<Unit*>(p.y) + blockIdx.x * units;
  if (id < 0 || id >= p.num_rows) {
    auto* shorts = reinterpret_cast<uint16_t*>(y);
    for (int64_t i = threadIdx.x; i < p.row_bytes / 2; i += blockDim.x) shorts[i] = 0xffff;
    return;
  }
  const Unit* row = static_cast<const Unit*>(p.table) + id * units;
  for (int64_t i = threadIdx.x; i < units; i += blockDim.x) y[i] = row[i];
}

// One CTA a token. A thread tests every blockDim.x-th element.
template <typename T>
__global__ void FiniteKernel(FiniteLaunch p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.dim;
  const T* x = static_cast<const T*>(p.x) + first;
  bool bad = false;
  for (int64_t i = threadIdx.x; i < p.dim; i += blockDim.x) {
    bad |= isfinite(static_cast<float>(x[i])) == 0;
  }
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0) p.finite[blockIdx.x] = any_bad ? 0 : 1;
}

__global__ void RandomFillKernel(const RandomRows rows, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    rows.Fill(i);
  }
}

}  // namespace

cudaError_t LaunchSumNorm(const SumNormLaunch& p, int64_t count, cudaStream_t stream) {
  const bool aligned = IsAligned({p.added, p.sum, p.weight, p.normed});
  return ForRuns(p.dtype, p.dim, aligned, [&]<typename T, int kCount>(Run<T, kCount>) {
    const auto kernel = p.added == nullptr    ? SumNormKernel<T, kCount, false, true>
                        : p.weight == nullptr ? SumNormKernel<T, kCount, true, false>
                                              : SumNormKernel<T, kCount, true, true>;
    return LaunchOverlapped(kernel, static_cast<unsigned>(count), NormThreads(p.dim / kCount), 0,
                            stream, p);
  });
}

cudaError_t LaunchSiluMul(const SiluMulRows& rows, int64_t count, cudaStream_t stream) {
  const bool aligned = IsAligned({rows.gate_up, rows.y});
  return ForRuns(rows.dtype, rows.dim, aligned, [&]<typename T, int kCount>(Run<T, kCount>) {
    const int64_t blocks = (rows.dim / kCount + kThreads - 1) / kThreads;
    return LaunchOverlapped(SiluMulKernel<T, kCount>,
                            dim3(static_cast<unsigned>(count), static_cast<unsigned>(blocks)),
                            kThreads, 0, stream, rows);
  });
}

cudaError_t LaunchRopeAngles(const AnglesLaunch& params, int64_t count, cudaStream_t stream) {
  RopeAnglesKernel<<<static_cast<unsigned>(count), ThreadsFor(params.half_dim), 0, stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t LaunchGather(const GatherLaunch& params, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(count);
  if (params.row_bytes % kRunBytes == 0 && IsAligned({params.table, params.y})) {
    GatherKernel<uint4><<<blocks, ThreadsFor(params.row_bytes / kRunBytes), 0, stream>>>(params);
  } else {
    GatherKernel<uint16_t><<<blocks, ThreadsFor(params.row_bytes / 2), 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t LaunchFinite(const FiniteLaunch& params, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(count);
  const unsigned threads = ThreadsFor(params.dim);
  params.dtype == DType::kFloat32 ? FiniteKernel<float><<<blocks, threads, 0, stream>>>(params)
                                  : FiniteKernel<BFloat16><<<blocks, threads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t FindKernels() {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, RandomFillKernel);
  return cudaGetLastError();  // not left for the next launch to find
}

cudaError_t LaunchRandomFill(const RandomRows& rows, int64_t count, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 4096;
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  RandomFillKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(rows, count);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
