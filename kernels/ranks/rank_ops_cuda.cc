#include "kernels/ranks/rank_ops_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/ranks/rank_ops_launch.h"

namespace kvasir::kernels {

absl::Status PeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                     cudaStream_t stream) {
  ShapeCheck check("peer_sum");
  check.Match("x", x, {"rows", "width"}, DType::kFloat32)
      .Match("y", y, {"rows", "width"}, DType::kBFloat16)
      .Require(x.num_elements() <= kPeerSumElements, "at most 32,768 elements")
      .Require(end.num_ranks <= kMaxPeers, "at most 8 ranks");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (x.num_elements() == 0) return absl::OkStatus();
  const PeerSumLaunch launch = {
      .end = end, .x = x.As<float>(), .y = y.As<BFloat16>(), .count = x.num_elements()};
  return CudaStatus(LaunchPeerSum(launch, stream), "launching peer_sum");
}

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
