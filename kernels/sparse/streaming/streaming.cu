// Each thread takes one row.
#include "kernels/base/cuda_status.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/select_row.cuh"
#include "kernels/sparse/streaming/streaming_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    StreamingKernel(const __grid_constant__ SelectLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.out.num_rows) return;
  DeviceRow row(p, index);
  row.numbers.budget_tokens = 0;
  p.out.headers[index] = MakeHeader(row.tile, row.numbers);
}

cudaError_t LaunchStreaming(const SelectLaunch& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.out.num_rows + kThreads - 1) / kThreads);
  return LaunchOverlapped(StreamingKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace

absl::Status SelectStreaming(const CudaSelectParams& p, const PageSelection& out,
                             cudaStream_t stream) {
  ShapeCheck check("streaming on the GPU");
  check.Require(p.numbers.size() == p.tiles.size(), "numbers must be one per query tile")
      .Require(out.num_rows == static_cast<int64_t>(p.tiles.size()) * p.kv.layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (out.num_rows == 0) return absl::OkStatus();
  const SelectLaunch launch = {
      .kv = p.kv, .tiles = p.tiles.data(), .numbers = p.numbers.data(), .out = out};
  return CudaStatus(LaunchStreaming(launch, stream), "launching streaming");
}

namespace {

class CudaStreaming final : public CudaSelector {
 public:
  std::optional<QueryDistance> RotatesQueries(int64_t) const override { return std::nullopt; }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds&, const PageSelection& out,
                      std::byte*, cudaStream_t stream) const override {
    return SelectStreaming(params, out, stream);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaStreaming(const MethodOptions& options) {
  KVASIR_RETURN_IF_ERROR(RequireNoOptions(options));
  return std::make_unique<CudaStreaming>();
}

}  // namespace kvasir::kernels
