#include "worker/backend/cuda/cuda_ranks.h"

#include <chrono>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::worker {

using kernels::MutexLock;
using kernels::TensorView;
using Clock = std::chrono::steady_clock;

namespace {

// Far below any timeout, and cheap compared with the work of a step.
constexpr auto kLookInterval = std::chrono::milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRanks>> CudaRanks::Join(Collective& ranks) {
  std::unique_ptr<CudaRanks> joined(new CudaRanks(ranks));
  KVASIR_ASSIGN_OR_RETURN(joined->progress_, kernels::PinnedBuffer::Allocate(sizeof(uint32_t)));
  *joined->progress_.As<uint32_t>() = 0;
  KVASIR_ASSIGN_OR_RETURN(joined->nccl_, NcclCommunicator::Join(ranks));
  KVASIR_ASSIGN_OR_RETURN(joined->peers_, PeerSums::Join(ranks));
  joined->watchdog_ = std::thread([ranks = joined.get()] { ranks->LookAfterSteps(); });
  return joined;
}

CudaRanks::~CudaRanks() {
  {
    MutexLock lock(mu_);
    is_leaving_ = true;
    leaving_.NotifyAll();
  }
  if (watchdog_.joinable()) watchdog_.join();
}

absl::Status CudaRanks::AddSum(const TensorView& x, const TensorView& y, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  if (peers_ != nullptr && PeerSums::Takes(x)) {
    return peers_->Add(x, y, progress_.As<uint32_t>(), stream.get());
  }
  KVASIR_RETURN_IF_ERROR(nccl_->AllReduceSum(x.As<float>(), x.num_elements(), stream.get()));
  return kernels::AddSums(x, y, progress_.As<uint32_t>(), stream.get());
}

absl::Status CudaRanks::GatherColumns(const RankColumns& columns, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  KVASIR_RETURN_IF_ERROR(nccl_->AllGather(columns.own.data(), columns.gathered.data(),
                                          columns.own.size_bytes(), stream.get()));
  return kernels::PlaceColumns({.gathered = columns.gathered,
                                .y = columns.y,
                                .first_rank = columns.first_rank,
                                .progress = progress_.As<uint32_t>()},
                               stream.get());
}

absl::Status CudaRanks::LookForSilence() const {
  if (is_silent_ || (peers_ != nullptr && peers_->gave_up())) {
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", rank_, ": another rank was silent for ",
                     absl::FormatDuration(patience_), "; it is dead or stopped"));
  }
  return absl::OkStatus();
}

absl::Status CudaRanks::LookForTrouble() const {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  return nccl_->Health();
}

void CudaRanks::LookAfterSteps() {
  int64_t step = 0;
  uint32_t seen = 0;
  Clock::time_point since = Clock::now();
  MutexLock lock(mu_);
  while (!is_leaving_) {
    leaving_.WaitUntil(mu_, Clock::now() + kLookInterval);
    const int64_t begun = steps_begun_;
    const uint32_t ended_calls = progress();
    if (begun != step || ended_calls != seen || steps_ended_ == begun) {
      step = begun;
      seen = ended_calls;
      since = Clock::now();
    } else if (absl::FromChrono(Clock::now() - since) > patience_) {
      is_silent_ = true;
      nccl_->BeginAbort();
      return;
    }
  }
}

absl::Status CudaRanks::Wait(const CudaEvent& end) {
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(const bool is_over, end.IsOver());
    KVASIR_RETURN_IF_ERROR(LookForTrouble());
    if (!is_over) continue;
    ++steps_ended_;
    return absl::OkStatus();
  }
}

void CudaRanks::Abandon(const CudaStream& stream) {
  nccl_->BeginAbort();
  stream.Wait().IgnoreError();  // sums among peers end by themselves
}

}  // namespace kvasir::worker
