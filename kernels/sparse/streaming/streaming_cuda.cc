#include "kernels/sparse/streaming/streaming_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/streaming/streaming_launch.h"

namespace kvasir::kernels {

absl::Status SelectStreaming(const CudaSelectParams& p, const PageSelection& out,
                             cudaStream_t stream) {
  ShapeCheck check("streaming on the GPU");
  check.Require(p.numbers.size() == p.blocks.size(), "numbers must be one per query block")
      .Require(out.num_rows == static_cast<int64_t>(p.blocks.size()) * p.kv.layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (out.num_rows == 0) return absl::OkStatus();
  const SelectLaunch launch = {
      .kv = p.kv, .blocks = p.blocks.data(), .numbers = p.numbers.data(), .out = out};
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
