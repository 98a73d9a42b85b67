// Sums and gathers among the GPUs of a group, over NCCL: put on a stream, by launch or under
// capture. It hides NCCL's handle, its states and its ways to fail. The ranks find each other
// through their Collective, which stays what they agree with on the host. Only in builds with CUDA.
//
// Every call is made by all ranks in the same order. None waits for the GPU; what a dead or stopped
// rank leaves unfinished on the stream is for its owner to notice (CudaRanks), who ends it by
// BeginAbort. Whether a rank captures and another launches does not matter: kernels are chosen by
// size alone, since registration of captured buffers is off (Join says where).
//
// Graphs with its calls must be destroyed before it, where they may run until then behind
// BeginAbort. Thread-compatible; BeginAbort is for any thread.
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
  // On the current device; all ranks at the same time. UNAVAILABLE when NCCL cannot connect them,
  // DEADLINE_EXCEEDED when a rank does not come.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Join(Collective& ranks);
  // What is still on a stream ends with it, as of BeginAbort.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // data = sum over ranks; the same bits on all.
  absl::Status AllReduceSum(float* data, int64_t count, cudaStream_t stream);
  // out = every rank's `in` in rank order, `bytes` each.
  absl::Status AllGather(const void* in, void* out, int64_t bytes, cudaStream_t stream);

  // What NCCL has noticed by itself, of work on the stream.
  absl::Status Health() const;
  // Ends what is unfinished on streams, with unspecified results, and every later call in an error.
  // Does not wait for it, and is not held up by a call at work.
  void BeginAbort();

 private:
  NcclCommunicator(int rank, absl::Duration patience) : rank_(rank), patience_(patience) {}

  // Waits until a call is made, with its result. NCCL makes it on a thread of its own.
  absl::Status Settle(ncclResult_t result, absl::string_view what, absl::Duration patience) const;
  // `call` makes it with the handle.
  template <typename Call>
  absl::StatusOr<ncclResult_t> Make(const Call& call) const;

  const int rank_;
  const absl::Duration patience_;
  // Held for a call into NCCL, none of which waits: the handle must not go meanwhile.
  mutable kernels::Mutex mu_;
  ncclComm_t comm_ GUARDED_BY(mu_) = nullptr;  // null: aborted
  std::thread aborting_;
};

}  // namespace kvasir::worker
