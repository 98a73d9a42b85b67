#include "worker/backend/cuda_ranks.h"

#include <chrono>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::worker {

using kernels::TensorView;
using Clock = std::chrono::steady_clock;

absl::StatusOr<std::unique_ptr<CudaRanks>> CudaRanks::Join(Collective& ranks) {
  std::unique_ptr<CudaRanks> joined(new CudaRanks(ranks));
  KVASIR_ASSIGN_OR_RETURN(joined->progress_, kernels::PinnedBuffer::Allocate(sizeof(uint32_t)));
  *joined->progress_.As<uint32_t>() = 0;
  KVASIR_ASSIGN_OR_RETURN(joined->nccl_, NcclCommunicator::Join(ranks));
  KVASIR_ASSIGN_OR_RETURN(joined->peers_, PeerSums::Join(ranks));
  return joined;
}

absl::Status CudaRanks::AddSum(const TensorView& x, const TensorView& y, const CudaStream& stream) {
  if (peers_ != nullptr && PeerSums::Takes(x)) return peers_->Add(x, y, stream.get());
  KVASIR_RETURN_IF_ERROR(nccl_->AllReduceSum(x.As<float>(), x.num_elements(), stream.get()));
  return kernels::AddSums(x, y, progress_.As<uint32_t>(), stream.get());
}

absl::Status CudaRanks::GatherColumns(const RankColumns& columns, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(nccl_->AllGather(columns.own.data(), columns.gathered.data(),
                                          columns.own.size_bytes(), stream.get()));
  return kernels::PlaceColumns({.gathered = columns.gathered,
                                .y = columns.y,
                                .first_rank = columns.first_rank,
                                .progress = progress_.As<uint32_t>()},
                               stream.get());
}

absl::Status CudaRanks::LookForTrouble() const {
  if (peers_ != nullptr && peers_->gave_up()) {
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", rank_, ": another rank was silent for ",
                     absl::FormatDuration(patience_), " in a sum among GPUs"));
  }
  return nccl_->Health();
}

absl::Status CudaRanks::Wait(const CudaEvent& end) {
  uint32_t seen = progress();
  Clock::time_point since = Clock::now();
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(const bool is_over, end.IsOver());
    KVASIR_RETURN_IF_ERROR(LookForTrouble());
    if (is_over) return absl::OkStatus();
    if (const uint32_t now = progress(); now != seen) {
      seen = now;
      since = Clock::now();
    } else if (absl::FromChrono(Clock::now() - since) > patience_) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, ": no collective ended within ",
                       absl::FormatDuration(patience_), "; another rank is dead or stopped"));
    }
  }
}

void CudaRanks::Abandon(const CudaStream& stream) {
  nccl_->BeginAbort();
  stream.Wait().IgnoreError();  // sums among peers end by themselves
}

}  // namespace kvasir::worker
