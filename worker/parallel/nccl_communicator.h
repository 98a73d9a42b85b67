// Sums and gathers among the GPUs of a group, over NCCL, put on a stream by launch or under
// capture. It hides NCCL's handle, its states and its ways to fail. The ranks find each other
// through their Collective, which they keep using on the host. Only in builds with CUDA.
//
// Every call is made by all ranks in the same order. None waits for the GPU: the owner (CudaRanks)
// must notice work on the stream that a dead or stopped rank leaves unfinished, and end it with
// BeginAbort. It does not matter whether one rank captures while another launches: kernels are
// chosen by size alone, since registration of captured buffers is off (see Join).
//
// Graphs that contain its calls must be destroyed before it, if they may still run after
// BeginAbort. Thread-compatible; BeginAbort may be called on any thread.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "nccl.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

class NcclCommunicator {
 public:
  // On the current device. All ranks call it at the same time. UNAVAILABLE when NCCL cannot connect
  // them, DEADLINE_EXCEEDED when a rank does not come.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Join(Collective& ranks);
  // Ends work that is still on a stream, as BeginAbort does.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // data = sum over ranks, or the largest, in the same bits on all.
  absl::Status AllReduceSum(float* data, int64_t count, cudaStream_t stream);
  absl::Status AllReduceSum(int64_t* data, int64_t count, cudaStream_t stream);
  absl::Status AllReduceMax(uint32_t* data, int64_t count, cudaStream_t stream);
  // out = every rank's `in` in rank order, `bytes` each.
  absl::Status AllGather(const void* in, void* out, int64_t bytes, cudaStream_t stream);

  // Returns errors that NCCL itself has noticed in work on the stream.
  absl::Status Health() const;
  // Makes unfinished work on streams end, with unspecified results, and every later call fail. Does
  // not wait for that, and is not held up by a call in progress.
  void BeginAbort();

 private:
  NcclCommunicator(int rank, absl::Duration patience) : rank_(rank), patience_(patience) {}

  // Waits until NCCL, which makes calls on a thread of its own, has made the call; returns its
  // result.
  absl::Status Settle(ncclResult_t result, absl::string_view what, absl::Duration patience) const;
  absl::Status AllReduce(void* data, int64_t count, ncclDataType_t type, ncclRedOp_t op,
                         cudaStream_t stream);
  // Makes a call: `call` takes the handle.
  template <typename Call>
  absl::StatusOr<ncclResult_t> Make(const Call& call) const;

  const int rank_;
  const absl::Duration patience_;
  // Held for each call into NCCL, none of which waits: the handle must not go away during it.
  mutable kernels::Mutex mu_;
  ncclComm_t comm_ GUARDED_BY(mu_) = nullptr;  // null: aborted
  std::thread aborting_;
};

}  // namespace kvasir::worker
