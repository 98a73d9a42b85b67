#include "tests/kernels/sparse/newest/newest_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

class CudaNewest final : public CudaSelector {
 public:
  // Reads no queries.
  std::optional<QueryDistance> RotatesQueries(int64_t) const override { return std::nullopt; }
  int64_t WorkspaceBytes(const SelectBounds&, const PagedKv&, int64_t) const override { return 1; }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds&, const PageSelection& out,
                      std::byte* workspace, cudaStream_t stream) const override {
    KVASIR_ASSIGN_OR_RETURN(const SelectLaunch launch,
                            MakeSelectLaunch("newest", params, out, workspace));
    if (out.num_rows == 0) return absl::OkStatus();
    return CudaStatus(LaunchNewest(launch, stream), "launching newest");
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaNewest(const MethodOptions& options) {
  KVASIR_RETURN_IF_ERROR(RequireNoOptions(options));
  return std::make_unique<CudaNewest>();
}

}  // namespace kvasir::kernels
