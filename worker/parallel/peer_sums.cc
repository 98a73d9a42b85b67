#include "worker/parallel/peer_sums.h"

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::DeviceBuffer;
using kernels::PinnedBuffer;

absl::StatusOr<std::unique_ptr<PeerSums>> PeerSums::Join(Collective& ranks) {
  if (ranks.size() > kernels::kMaxPeers) return std::unique_ptr<PeerSums>();
  std::unique_ptr<PeerSums> sums(new PeerSums());
  constexpr int64_t kCounters =
      kernels::kPeerSumCounters + kernels::kSlicedSumCtas + kernels::kPeerRowCtas;
  constexpr int64_t kCounterBytes = (kCounters + 1) * int64_t{sizeof(uint32_t)};
  constexpr int64_t kInboxBytes = kernels::kPeerSumInboxLines * int64_t{sizeof(uint64_t)};
  constexpr int64_t kRowInboxBytes = kernels::kPeerRowInboxLines * int64_t{sizeof(uint64_t)};
  KVASIR_ASSIGN_OR_RETURN(sums->counters_, DeviceBuffer::Allocate(kCounterBytes));
  KVASIR_RETURN_IF_ERROR(
      kernels::CudaStatus(cudaMemset(sums->counters_.data(), 0, static_cast<size_t>(kCounterBytes)),
                          "clearing memory"));
  KVASIR_ASSIGN_OR_RETURN(sums->gave_up_, PinnedBuffer::Allocate(sizeof(uint32_t)));
  *sums->gave_up_.As<uint32_t>() = 0;
  KVASIR_ASSIGN_OR_RETURN(
      sums->memory_,
      PeerMemory::Share(kInboxBytes + kRowInboxBytes + kernels::kSlicedSumBytes, ranks));
  if (sums->memory_ == nullptr) return std::unique_ptr<PeerSums>();
  uint32_t* const counters = sums->counters_.As<uint32_t>();
  sums->end_ = {.rank = ranks.rank(),
                .num_ranks = ranks.size(),
                .inboxes = {},
                .slices = {},
                .row_inboxes = {},
                .calls = counters,
                .sliced_calls = counters + kernels::kPeerSumCounters,
                .row_turns = counters + kernels::kPeerSumCounters + kernels::kSlicedSumCtas,
                .gave_up = counters + kCounters,
                .gave_up_host = sums->gave_up_.As<uint32_t>(),
                .patience_ns = absl::ToInt64Nanoseconds(ranks.timeout())};
  for (int rank = 0; rank < ranks.size(); ++rank) {
    std::byte* const memory = sums->memory_->of_rank(rank);
    sums->end_.inboxes[rank] = reinterpret_cast<uint64_t*>(memory);
    sums->end_.row_inboxes[rank] = reinterpret_cast<uint64_t*>(memory + kInboxBytes);
    sums->end_.slices[rank] = memory + kInboxBytes + kRowInboxBytes;
  }
  return sums;
}

}  // namespace kvasir::worker
