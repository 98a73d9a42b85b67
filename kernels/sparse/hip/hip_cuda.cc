#include "kernels/sparse/hip/hip_cuda.h"

#include <algorithm>

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/hip/hip_launch.h"
#include "kernels/sparse/hip/hip_rule.h"

namespace kvasir::kernels {
namespace {

// Lays out the workspace and returns its size in bytes.
int64_t LayOut(std::byte* workspace, const HipCuda& method, int64_t rows, HipLaunch& launch) {
  launch.max_nodes = CeilHipBlocks(method.max_budget_tokens);
  const int64_t nodes = rows * launch.max_nodes;
  ScratchPieces pieces(workspace);
  launch.num_halves = pieces.Take<int32_t>(rows);
  launch.nodes = pieces.Take<HipNode>(nodes);
  launch.halves = pieces.Take<HipNode>(2 * nodes);
  launch.scores = pieces.Take<uint32_t>(2 * nodes);
  launch.begins = pieces.Take<int32_t>(nodes);
  launch.kept_scores = pieces.Take<uint32_t>(nodes);
  return pieces.bytes();
}

}  // namespace

int64_t HipWorkspaceBytes(const HipCuda& method, const PagedKv& kv, int64_t blocks) {
  HipLaunch launch;
  return LayOut(nullptr, method, blocks * kv.layout.num_kv_heads, launch);
}

absl::Status SelectHip(const HipCuda& method, const CudaSelectParams& params,
                       const PageSelection& out, std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("hip", params, out, workspace));
  KVASIR_RETURN_IF_ERROR(RequirePlacedQueries("hip", params));
  if (params.tiles.empty()) return absl::OkStatus();
  HipLaunch launch = {.select = select, .faults = params.faults.data()};
  LayOut(workspace, method, out.num_rows, launch);
  return CudaStatus(LaunchHip(launch, stream), "launching hip");
}

namespace {

class CudaHip final : public CudaSelector {
 public:
  int64_t WorkspaceBytes(const SelectBounds& bounds, const PagedKv& kv,
                         int64_t tiles) const override {
    return HipWorkspaceBytes(Method(bounds), kv, tiles);
  }
  absl::Status Select(const CudaSelectParams& params, const SelectBounds& bounds,
                      const PageSelection& out, std::byte* workspace,
                      cudaStream_t stream) const override {
    return SelectHip(Method(bounds), params, out, workspace, stream);
  }

 private:
  static HipCuda Method(const SelectBounds& bounds) {
    return {.max_budget_tokens = bounds.budget_tokens};
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaHip(const MethodOptions& options) {
  KVASIR_RETURN_IF_ERROR(RequireNoOptions(options));
  return std::make_unique<CudaHip>();
}

}  // namespace kvasir::kernels
