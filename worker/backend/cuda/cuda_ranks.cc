#include "worker/backend/cuda/cuda_ranks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/ranks/rank_ops_cuda.h"
#include "worker/parallel/gather_values.h"

namespace kvasir::worker {

using kernels::MutexLock;
using kernels::TensorView;
using Clock = std::chrono::steady_clock;

namespace {

// Far below any timeout, and cheap compared with the work of a step.
constexpr auto kLookInterval = std::chrono::milliseconds(50);
// A look so late says that this process was stopped, or its thread had no turn.
constexpr auto kLateLook = std::chrono::seconds(1);

// Whether two ranks are on one GPU, as in tests on a machine with few. The same on all ranks.
absl::StatusOr<bool> AnyShareAGpu(Collective& ranks) {
  int device = 0;
  cudaDeviceProp gpu;
  KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(cudaGetDevice(&device), "looking for a GPU"));
  KVASIR_RETURN_IF_ERROR(
      kernels::CudaStatus(cudaGetDeviceProperties(&gpu, device), "describing the GPU"));
  using Uuid = std::array<char, sizeof(gpu.uuid.bytes)>;
  Uuid own;
  std::copy_n(gpu.uuid.bytes, own.size(), own.begin());
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Uuid> all, GatherValues(ranks, own));
  return std::set<Uuid>(all.begin(), all.end()).size() < all.size();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRanks>> CudaRanks::Join(Collective& ranks) {
  std::unique_ptr<CudaRanks> joined(new CudaRanks(ranks));
  KVASIR_ASSIGN_OR_RETURN(joined->progress_, kernels::PinnedBuffer::Allocate(sizeof(uint32_t)));
  *joined->progress_.As<uint32_t>() = 0;
  KVASIR_ASSIGN_OR_RETURN(const bool share_gpu, AnyShareAGpu(ranks));
  if (!share_gpu) {
    KVASIR_ASSIGN_OR_RETURN(joined->nccl_, NcclCommunicator::Join(ranks));
  }
  KVASIR_ASSIGN_OR_RETURN(joined->peers_, PeerSums::Join(ranks));
  if (joined->nccl_ == nullptr && joined->peers_ == nullptr) {
    return absl::UnavailableError(
        "ranks share a GPU, which NCCL refuses, and cannot reach each other's memory; give each "
        "rank a GPU");
  }
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
  if (nccl_ == nullptr) return absl::UnimplementedError("ranks that share a GPU: an odd sum");
  KVASIR_RETURN_IF_ERROR(nccl_->AllReduceSum(x.As<float>(), x.num_elements(), stream.get()));
  return kernels::AddSums(x, y, progress_.As<uint32_t>(), stream.get());
}

absl::Status CudaRanks::GatherColumns(const RankColumns& columns, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  KVASIR_RETURN_IF_ERROR(Gather(columns, stream));
  return kernels::PlaceColumns({.gathered = columns.gathered,
                                .y = columns.y,
                                .first_rank = columns.first_rank,
                                .progress = progress_.As<uint32_t>()},
                               stream.get());
}

absl::Status CudaRanks::Gather(const RankColumns& columns, const CudaStream& stream) {
  const int64_t bytes = columns.own.size_bytes();
  auto* const gathered = static_cast<std::byte*>(columns.gathered.data());
  if (nccl_ != nullptr) {
    return nccl_->AllGather(columns.own.data(), gathered, bytes, stream.get());
  }
  // The largest of a rank's words and the zeros of the others.
  constexpr int64_t kWord = sizeof(uint32_t);
  if (bytes % kWord != 0) {
    return absl::UnimplementedError("ranks that share a GPU: a gather of an odd size");
  }
  KVASIR_RETURN_IF_ERROR(stream.Clear(gathered, columns.gathered.size_bytes()));
  KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(
      cudaMemcpyAsync(gathered + rank_ * bytes, columns.own.data(), static_cast<size_t>(bytes),
                      cudaMemcpyDeviceToDevice, stream.get()),
      "copying a rank's own columns"));
  return peers_->Max({.values = reinterpret_cast<uint32_t*>(gathered),
                      .rows = 1,
                      .stride = columns.gathered.size_bytes() / kWord},
                     stream.get());
}

absl::Status CudaRanks::Sum(const kernels::RankRows<int64_t>& rows, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  if (peers_ != nullptr) return peers_->Sum(rows, stream);
  return nccl_->AllReduceSum(rows.values, rows.rows * rows.stride, stream);
}

absl::Status CudaRanks::Max(const kernels::RankRows<uint32_t>& rows, cudaStream_t stream) {
  KVASIR_RETURN_IF_ERROR(LookForSilence());
  if (peers_ != nullptr) return peers_->Max(rows, stream);
  return nccl_->AllReduceMax(rows.values, rows.rows * rows.stride, stream);
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
  return nccl_ == nullptr ? absl::OkStatus() : nccl_->Health();
}

void CudaRanks::LookAfterSteps() {
  int64_t step = 0;
  uint32_t seen = 0;
  Clock::time_point since = Clock::now();
  MutexLock lock(mu_);
  while (!is_leaving_) {
    const Clock::time_point due = Clock::now() + kLookInterval;
    leaving_.WaitUntil(mu_, due);
    // Then nobody knows how long the others were silent.
    if (Clock::now() > due + kLateLook) since = Clock::now();
    const int64_t begun = steps_begun_;
    const uint32_t ended_calls = progress();
    if (begun != step || ended_calls != seen || steps_ended_ == begun) {
      step = begun;
      seen = ended_calls;
      since = Clock::now();
    } else if (absl::FromChrono(Clock::now() - since) > patience_) {
      is_silent_ = true;
      if (nccl_ != nullptr) nccl_->BeginAbort();
      return;
    }
  }
}

absl::Status CudaRanks::Wait(const CudaEvent& end, int64_t step) {
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(const bool is_over, end.IsOver());
    KVASIR_RETURN_IF_ERROR(LookForTrouble());
    if (!is_over) continue;
    steps_ended_ = step;
    return absl::OkStatus();
  }
}

void CudaRanks::Abandon() {
  if (nccl_ != nullptr) nccl_->BeginAbort();  // sums among peers end by themselves
}

absl::Status CudaSelectRanks::Sum(const kernels::RankRows<int64_t>& rows, cudaStream_t stream) {
  if (!counts_) {
    const auto bytes = static_cast<size_t>(rows.rows * rows.stride) * sizeof(int64_t);
    KVASIR_RETURN_IF_ERROR(kernels::CudaStatus(cudaMemsetAsync(rows.values, 0, bytes, stream),
                                               "clearing what another rank counts"));
  }
  return ranks_->Sum(rows, stream);
}

}  // namespace kvasir::worker
