// Sums and maxima among the GPUs of a group, each of which writes into the memory of the others
// (kernels/ranks): a library takes several times as long as one write to reach a peer, and adds
// ranks in an order that depends on where an element lies in its message. Put on a stream, by
// launch or under capture. Made when a group forms, and not used again once waiting for a rank has
// failed. Only in builds with CUDA. Thread-compatible.
#pragma once

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/base/tensor.h"
#include "kernels/ranks/rank_ops_cuda.h"
#include "worker/parallel/collective.h"
#include "worker/parallel/peer_memory.h"

namespace kvasir::worker {

class PeerSums {
 public:
  // On the current device. All ranks call it at the same time. Null on every rank where some rank's
  // memory cannot be reached by another, or there are more than kMaxPeers ranks.
  static absl::StatusOr<std::unique_ptr<PeerSums>> Join(Collective& ranks);

  static bool Takes(const kernels::TensorView& x) {
    return x.num_elements() <= kernels::kPeerSumElements ||
           x.num_elements() % kernels::kSlicedSumUnit == 0;
  }
  // Like kernels::PeerSum, or kernels::SlicedPeerSum where the message is larger; both give the
  // same bits. `progress`, in pinned memory, counts launches of the latter. REQUIRES: Takes(x).
  absl::Status Add(const kernels::TensorView& x, const kernels::TensorView& y, uint32_t* progress,
                   cudaStream_t stream) const {
    if (x.num_elements() <= kernels::kPeerSumElements) return kernels::PeerSum(end_, x, y, stream);
    return kernels::SlicedPeerSum(end_, x, y, progress, stream);
  }
  // Like kernels::SumRows and kernels::MaxRows.
  absl::Status Sum(const kernels::RankRows<int64_t>& rows, cudaStream_t stream) const {
    return kernels::SumRows(end_, rows, stream);
  }
  absl::Status Max(const kernels::RankRows<uint32_t>& rows, cudaStream_t stream) const {
    return kernels::MaxRows(end_, rows, stream);
  }
  // Whether a rank was silent for longer than the Collective's timeout. Then sums are NaN.
  bool gave_up() const { return *static_cast<const volatile uint32_t*>(end_.gave_up_host) != 0; }

 private:
  PeerSums() = default;

  std::unique_ptr<PeerMemory> memory_;  // inboxes, those of rows, slices
  kernels::DeviceBuffer counters_;
  kernels::PinnedBuffer gave_up_;
  kernels::PeerSumEnd end_;
};

}  // namespace kvasir::worker
