// Communication among the ranks of a tensor-parallel group. Every call is made by all ranks in the
// same order and is bounded in time: a dead or silent peer becomes UNAVAILABLE or DEADLINE_EXCEEDED
// on the others. After that the collective is broken for good (the group is formed again). Sums are
// taken in rank order on every rank, so all ranks get the same bits. It moves host memory, whatever
// the ranks compute on; data on GPUs goes over NCCL (nccl_communicator.h), which is set up over
// this. Implementations: Gloo; one rank alone needs no network. Thread-compatible: used only by the
// engine's thread.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace kvasir::worker {

class Collective {
 public:
  virtual ~Collective() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Longest time for which a peer may be silent.
  virtual absl::Duration timeout() const = 0;
  // data[i] = sum over ranks of data[i], in place.
  virtual absl::Status AllReduceSum(absl::Span<float> data) = 0;
  // out = concatenation of every rank's `in` in rank order; out.size() = size() * in.size().
  virtual absl::Status AllGather(absl::Span<const float> in, absl::Span<float> out) = 0;
};

}  // namespace kvasir::worker
