// Sums of small messages among the GPUs of a group, each of which writes into the memory of the
// others (kernels/ranks): where a library takes several times the time of one write to reach a
// peer. Put on a stream, by launch or under capture. Made when a group forms, and not used any more
// once a rank was waited for in vain. Only in builds with CUDA. Thread-compatible.
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
  // On the current device; all ranks at the same time. Null, on every rank, where some rank's
  // memory cannot be reached by another, or they are more than kMaxPeers.
  static absl::StatusOr<std::unique_ptr<PeerSums>> Join(Collective& ranks);

  static bool Takes(const kernels::TensorView& x) {
    return x.num_elements() <= kernels::kPeerSumElements;
  }
  // As kernels::PeerSum. REQUIRES: Takes(x).
  absl::Status Add(const kernels::TensorView& x, const kernels::TensorView& y,
                   cudaStream_t stream) const {
    return kernels::PeerSum(end_, x, y, stream);
  }
  // A rank was silent for longer than the Collective's timeout: sums are NaN.
  bool gave_up() const { return *static_cast<const volatile uint32_t*>(end_.gave_up_host) != 0; }

 private:
  PeerSums() = default;

  std::unique_ptr<PeerMemory> inboxes_;
  kernels::DeviceBuffer counters_;
  kernels::PinnedBuffer gave_up_;
  kernels::PeerSumEnd end_;
};

}  // namespace kvasir::worker
