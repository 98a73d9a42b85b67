// The other ranks of a group as a GPU's step sees them: sums, maxima and gathers on its stream, and
// the wait for its end, which is bounded although kernels wait for peers that may be gone. It hides
// which messages go straight between GPUs and which through NCCL. Held by the CUDA backend, with
// the stream that everything is put on; graphs of that stream are destroyed before it.
// Thread-compatible.
//
// A thread of its own watches over steps. The thread that launches them may be held up before it
// comes to Wait: the driver loads a kernel at first use, and not while another kernel runs that
// waits for a rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/device_buffer.h"
#include "kernels/base/mutex.h"
#include "kernels/ranks/rank_rows.h"
#include "kernels/sparse/common/cuda_selector.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/memory/cuda_memory.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/parallel/nccl_communicator.h"
#include "worker/parallel/peer_sums.h"

namespace kvasir::worker {

class CudaRanks {
 public:
  ~CudaRanks();
  // On the current device. All ranks call it at the same time. Errors are those of
  // NcclCommunicator::Join. Ranks that share a GPU, which NCCL refuses, do all among peers;
  // UNAVAILABLE where they cannot.
  static absl::StatusOr<std::unique_ptr<CudaRanks>> Join(Collective& ranks);

  // y += sum over ranks of x. Sums are in float32, as on the CPU: partial results are not rounded
  // before they are added, and small messages take the same time in either width. x is overwritten.
  absl::Status AddSum(const kernels::TensorView& x, const kernels::TensorView& y,
                      const CudaStream& stream);
  absl::Status GatherColumns(const RankColumns& columns, const CudaStream& stream);
  // Each value becomes its sum, or the largest, over the ranks.
  absl::Status Sum(const kernels::RankRows<int64_t>& rows, cudaStream_t stream);
  absl::Status Max(const kernels::RankRows<uint32_t>& rows, cudaStream_t stream);

  // A step's collectives follow, up to the step's Wait. Returns the step's number. If no collective
  // ends within the group's timeout, those of all begun steps end in errors, so that a launch which
  // waits for room in the queue goes on.
  int64_t BeginStep() { return ++steps_begun_; }
  // Waits for the event that the step recorded last, any number of times. Steps are waited for in
  // their order. DEADLINE_EXCEEDED when another rank was silent for too long, UNAVAILABLE when NCCL
  // has noticed an error. After an error, call Abandon and wait for the stream.
  absl::Status Wait(const CudaEvent& end, int64_t step);
  // Has everything on the stream that waits for ranks end. Final.
  void Abandon();

 private:
  explicit CudaRanks(const Collective& ranks) : rank_(ranks.rank()), patience_(ranks.timeout()) {}

  // Fills columns.gathered.
  absl::Status Gather(const RankColumns& columns, const CudaStream& stream);
  void LookAfterSteps();
  // Looks at local state only: makes no call into NCCL.
  absl::Status LookForSilence() const;
  // Returns the error that ends the wait early, if any.
  absl::Status LookForTrouble() const;
  uint32_t progress() const { return *progress_.As<volatile uint32_t>(); }

  const int rank_;
  const absl::Duration patience_;
  std::unique_ptr<NcclCommunicator> nccl_;  // null: ranks share a GPU
  std::unique_ptr<PeerSums> peers_;         // null: ranks cannot reach each other's memory
  kernels::PinnedBuffer progress_;          // number of large sums and gathers that have ended

  std::atomic<int64_t> steps_begun_ = 0;
  std::atomic<int64_t> steps_ended_ = 0;
  std::atomic<bool> is_silent_ = false;  // another rank was silent for too long
  kernels::Mutex mu_;
  kernels::CondVar leaving_;
  bool is_leaving_ GUARDED_BY(mu_) = false;
  std::thread watchdog_;
};

// The ranks of a step as selections of layer scope see them.
class CudaSelectRanks final : public kernels::CudaLayerRanks {
 public:
  CudaSelectRanks() = default;
  // Null: this rank is alone. Outlives the step.
  CudaSelectRanks(CudaRanks* ranks, const ShardPlan& shard)
      : ranks_(ranks), counts_(shard.replica() == 0) {}

  // This rank's part of each layer.
  kernels::LayerPart PartOf(const ShardPlan& shard) {
    const int64_t heads = shard.kv_heads.size() * shard.num_ranks / shard.kv_replicas;
    return {.ranks = ranks_ == nullptr ? nullptr : this,
            .first_head = shard.kv_heads.begin,
            .num_heads = heads};
  }

  absl::Status Sum(const kernels::RankRows<int64_t>& rows, cudaStream_t stream) override;
  absl::Status Max(const kernels::RankRows<uint32_t>& rows, cudaStream_t stream) override {
    return ranks_->Max(rows, stream);
  }

 private:
  CudaRanks* ranks_ = nullptr;
  bool counts_ = true;  // false: another rank has the same KV heads
};

}  // namespace kvasir::worker
