#include "kernels/sparse/art/art_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/art/art_launch.h"
#include "kernels/sparse/art/art_terminator.h"
#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

namespace {

// Lays out the workspace and returns its size in bytes.
int64_t LayOut(std::byte* workspace, const PagedKv& kv, int64_t rows, int64_t group, ArtLaunch& p) {
  ScratchPieces pieces(workspace);
  p.unread = pieces.Take<float>(rows * (kv.max_blocks_per_slot + 1) * group);
  p.ranked = pieces.Take<Ranked>(rows * kv.max_blocks_per_slot);
  return pieces.bytes();
}

}  // namespace

int64_t AttendArtWorkspaceBytes(const PagedKv& kv, int64_t blocks, int64_t group) {
  ArtLaunch launch;
  return LayOut(nullptr, kv, blocks * kv.layout.num_kv_heads, group, launch);
}

absl::Status AttendArt(const CudaAttendParams& params, const ArtCuda& art, const KvTensorMaps& maps,
                       std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const AttendLaunch launch, MakeAttendLaunch(params));
  ShapeCheck check("art on the GPU");
  check.Require(art.numbers.size() == params.tiles.size(), "numbers must be one per query tile")
      .Require(!params.grouped.on(), "rows at grouped positions cannot be terminated")
      .Require(launch.group <= kMaxDecodeHeads, "a KV head has at most 8 query heads")
      .Require(static_cast<int64_t>(params.device_counts.size()) == params.selection.num_rows,
               "device_counts must be one per row");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireBounds("art", params.kv));
  if (params.tiles.empty()) return absl::OkStatus();
  ArtLaunch p = {launch};
  p.options = art.options;
  p.numbers = art.numbers.data();
  LayOut(workspace, params.kv, params.selection.num_rows, p.group, p);
  if (art.options.order == ReadingOrder::kImportance) {
    KVASIR_RETURN_IF_ERROR(CudaStatus(LaunchArtOrder(p, stream), "launching the order of art"));
  } else {
    p.ranked = nullptr;
  }
  return CudaStatus(LaunchAttendArt(p, maps, stream), "launching art");
}

namespace {

class CudaArt final : public CudaTerminator {
 public:
  explicit CudaArt(const ArtOptions& options) : options_(options) {}

  int64_t WorkspaceBytes(const PagedKv& kv, int64_t tiles, int64_t group) const override {
    return AttendArtWorkspaceBytes(kv, tiles, group);
  }
  absl::Status Attend(const CudaAttendParams& params, std::span<const PolicyNumbers> numbers,
                      const KvTensorMaps& maps, std::byte* workspace,
                      cudaStream_t stream) const override {
    return AttendArt(params, {.options = options_, .numbers = numbers}, maps, workspace, stream);
  }

 private:
  const ArtOptions options_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaTerminator>> MakeCudaArt(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const ArtOptions parsed, ArtTerminator::Parse(options));
  return std::make_unique<CudaArt>(parsed);
}

}  // namespace kvasir::kernels
