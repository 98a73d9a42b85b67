// Copies of pages between the tiers, by few warps beside a step's other kernels.
#include <algorithm>
#include <cstddef>

#include "kernels/base/status_macros.h"
#include "kernels/residency/page_pieces.cuh"
#include "kernels/residency/residency_cuda.h"
#include "kernels/residency/residency_launch.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kFillBlocks = 32;  // CTAs of kFillThreads: 512 KiB in flight, on few multiprocessors
constexpr int kFillThreads = 128;
constexpr int kGatherThreads = 128;
constexpr int kMostGathered = 16;  // extents

__global__ void __launch_bounds__(kFillThreads)
    FillKernel(const __grid_constant__ ResidencyState s) {
  const int64_t pieces = NumPieces(s);
  for (int64_t unit = FirstUnit(); unit < s.counters->num_fills * pieces; unit += UnitStride()) {
    const PageFill& fill = s.fills[unit / pieces];
    CopyPiece(s.shape.host_page(fill.page), s.shape.slot_memory(fill.slot), unit % pieces,
              s.shape.page_bytes);
  }
}

struct GatheredExtents {
  int32_t extents[kMostGathered];
};

// A page that is not in the device tier is read from its extent.
__global__ void GatherKernel(const __grid_constant__ ResidencyState s,
                             const __grid_constant__ GatheredExtents from, int64_t num_extents,
                             std::byte* to) {
  const int64_t pieces = NumPieces(s);
  const int64_t units = num_extents * s.shape.pages_per_extent * pieces;
  for (int64_t unit = FirstUnit(); unit < units; unit += UnitStride()) {
    const int64_t i = unit / pieces;
    const int64_t page = from.extents[i / s.shape.pages_per_extent] * s.shape.pages_per_extent +
                         i % s.shape.pages_per_extent;
    const bool is_here = s.pages[page].tier() == PageTier::kDevice;
    CopyPiece(is_here ? s.pages[page].page() : s.shape.host_page(page), to + i * s.shape.page_bytes,
              unit % pieces, s.shape.page_bytes);
  }
}

}  // namespace

absl::Status CopyExtentsToHost(const ResidencyState& s, std::span<const int32_t> extents,
                               std::span<std::byte> gathered, cudaStream_t stream) {
  const int64_t extent_bytes = s.shape.pages_per_extent * s.shape.page_bytes;
  const auto most =
      static_cast<size_t>(std::min<int64_t>(kMostGathered, std::ssize(gathered) / extent_bytes));
  KVASIR_CHECK(most > 0 || extents.empty());
  for (; !extents.empty(); extents = extents.subspan(std::min(most, extents.size()))) {
    const std::span<const int32_t> some = extents.first(std::min(most, extents.size()));
    GatheredExtents from = {};
    std::copy(some.begin(), some.end(), from.extents);
    GatherKernel<<<kWideBlocks, kGatherThreads, 0, stream>>>(s, from, std::ssize(some),
                                                             gathered.data());
    KVASIR_RETURN_IF_ERROR(Launched("launching copy_extents_to_host"));
    for (size_t i = 0; i < some.size(); ++i) {
      KVASIR_RETURN_IF_ERROR(CudaStatus(
          cudaMemcpyAsync(s.shape.host_page(some[i] * s.shape.pages_per_extent),
                          gathered.data() + static_cast<int64_t>(i) * extent_bytes,
                          static_cast<size_t>(extent_bytes), cudaMemcpyDeviceToHost, stream),
          "copying extents to the host"));
    }
  }
  return absl::OkStatus();
}

absl::Status CopyFills(const ResidencyState& s, cudaStream_t stream) {
  // A multiprocessor divides its memory into cache and shared memory only while it is idle. Use the
  // division that a step's other kernels want. Otherwise they would wait until the copies end.
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(FillKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 "preparing copy_fills"));
  FillKernel<<<kFillBlocks, kFillThreads, 0, stream>>>(s);
  return Launched("launching copy_fills");
}

}  // namespace kvasir::kernels
