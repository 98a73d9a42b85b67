// Adds sums that a library made, and places what it gathered side by side.
#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;  // CTAs; each takes further elements in turn

struct AddLaunch {
  const float* x;  // [count]
  BFloat16* y;     // [count]
  int64_t count;   // at least 1
  uint32_t* progress;
};

struct PlaceLaunch {
  const void* gathered;  // [num_ranks][rows][width]; the last rank's rows are [width or fewer]
  void* y;               // [rows][columns]
  int64_t rows, width, columns, first_rank;
  int64_t element_bytes;  // 2 or 4
  uint32_t* progress;
};

__device__ void CountUp(uint32_t* progress) {
  volatile uint32_t* const count = progress;
  if (blockIdx.x == 0 && threadIdx.x == 0) *count = *count + 1;
}

__global__ void AddKernel(const __grid_constant__ AddLaunch p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count;
       i += stride) {
    p.y[i] = BFloat16(static_cast<float>(p.y[i]) + static_cast<float>(BFloat16(p.x[i])));
  }
  CountUp(p.progress);
}

template <typename Element>
__global__ void PlaceKernel(const __grid_constant__ PlaceLaunch p) {
  const auto* const gathered = static_cast<const Element*>(p.gathered);
  auto* const y = static_cast<Element*>(p.y);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < p.rows * p.columns; i += stride) {
    const int64_t row = i / p.columns, column = i % p.columns;
    const int64_t part = column / p.width;
    const int64_t left = p.columns - part * p.width;
    const int64_t width = left < p.width ? left : p.width;
    const int64_t rank_begin = (p.first_rank + part) * p.rows * p.width;
    y[i] = gathered[rank_begin + row * width + column % p.width];
  }
  CountUp(p.progress);
}

unsigned BlocksFor(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

cudaError_t LaunchAdd(const AddLaunch& p, cudaStream_t stream) {
  AddKernel<<<BlocksFor(p.count), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchPlace(const PlaceLaunch& p, cudaStream_t stream) {
  const unsigned blocks = BlocksFor(p.rows * p.columns);
  if (p.element_bytes == 4) {
    PlaceKernel<uint32_t><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    PlaceKernel<uint16_t><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

absl::Status AddSums(const TensorView& x, const TensorView& y, uint32_t* progress,
                     cudaStream_t stream) {
  ShapeCheck check("add_sums");
  check.Match("x", x, {"rows", "width"}, DType::kFloat32)
      .Match("y", y, {"rows", "width"}, DType::kBFloat16);
  KVASIR_RETURN_IF_ERROR(check.status());
  if (x.num_elements() == 0) return absl::OkStatus();
  const AddLaunch launch = {
      .x = x.As<float>(), .y = y.As<BFloat16>(), .count = x.num_elements(), .progress = progress};
  return CudaStatus(LaunchAdd(launch, stream), "launching add_sums");
}

absl::Status PlaceColumns(const PlaceColumnsParams& params, cudaStream_t stream) {
  const TensorView &gathered = params.gathered, &y = params.y;
  ShapeCheck check("place_columns");
  check.Match("gathered", gathered, {"rows of ranks", "width"})
      .Match("y", y, {"rows", "columns"}, gathered.dtype())
      .Require(gathered.dtype() == DType::kFloat32 || gathered.dtype() == DType::kBFloat16,
               "elements must be float32 or bfloat16");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (y.num_elements() == 0) return absl::OkStatus();
  const int64_t rows = y.dim(0), width = gathered.dim(1);
  const int64_t parts = (y.dim(1) + width - 1) / width;
  check.Require((params.first_rank + parts) * rows <= gathered.dim(0),
                "y has more columns than the ranks");
  KVASIR_RETURN_IF_ERROR(check.status());
  const PlaceLaunch launch = {.gathered = gathered.data(),
                              .y = y.data(),
                              .rows = rows,
                              .width = width,
                              .columns = y.dim(1),
                              .first_rank = params.first_rank,
                              .element_bytes = static_cast<int64_t>(DTypeSize(y.dtype())),
                              .progress = params.progress};
  return CudaStatus(LaunchPlace(launch, stream), "launching place_columns");
}

}  // namespace kvasir::kernels
