// What the GPUs of a tensor-parallel group compute together, beside a communication library: a sum
// of small messages that each rank writes straight into the memory of the others, and the
// arithmetic around the library's own sums and gathers. All pointers are device memory. Called by
// the worker's backend. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

inline constexpr int kMaxPeers = 8;
// Of one sum: 64 KiB as bfloat16, which is what it ends as.
inline constexpr int64_t kPeerSumElements = 32 * 1024;

// One rank's end of sums among peers. Constant while graphs with its sums are in use.
//
// A line is 8 bytes, an element and the number of the call that it belongs to, and is written and
// read as a whole: who sees the number has the element, without a fence or a flag of its own. A
// rank may be one call ahead of another and no further, as it needs what that one sends in each
// call; so lines of two calls are kept apart, and no more.
struct PeerSumEnd {
  int rank = 0;
  int num_ranks = 1;  // at most kMaxPeers
  // By rank, this one's included: [2][num_ranks][kPeerSumElements] lines, zero before the first
  // call; in memory of that rank, which all can write.
  uint64_t* inboxes[kMaxPeers] = {};
  // Of this rank: what blocks of the kernel count their calls in, [kPeerSumCounters], zero before
  // the first call.
  uint32_t* calls = nullptr;
  // Of this rank, zero before the first call: not zero once a rank was waited for in vain; from
  // then on no sum waits, and all are NaN. `gave_up_host` is pinned memory, for the host to see it.
  uint32_t* gave_up = nullptr;
  uint32_t* gave_up_host = nullptr;
  int64_t patience_ns = 0;  // for the peers, in each call
};

inline constexpr int64_t kPeerSumInboxLines = 2 * kMaxPeers * kPeerSumElements;
inline constexpr int64_t kPeerSumCounters = 64;

// y += sum over ranks of their x, in rank order: the sum is rounded, then what it is added to; the
// same bits on every rank that has the same y. x [rows, width] float32, y [rows, width] bfloat16,
// at most kPeerSumElements elements. Every rank calls it with the same shape, in the same order; by
// launch or in a graph, as each likes.
// INVALID_ARGUMENT on shapes; INTERNAL with CUDA's error when the launch fails. Cost: writes 8
// bytes an element to each peer, and takes about the time of one write to reach them. Calls behind
// one another on a stream begin together and wait in place: ranks that share a GPU, as in tests,
// must leave room for each other's.
absl::Status PeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                     cudaStream_t stream);

// y += x, rounded as there; x [rows, width] float32, y of its shape in bfloat16. Counts up
// *progress, in pinned memory: what was waited for before it has come.
absl::Status AddSums(const TensorView& x, const TensorView& y, uint32_t* progress,
                     cudaStream_t stream);

struct PlaceColumnsParams {
  TensorView gathered;  // [num_ranks * rows, width]: of each rank its columns
  // [rows, columns]: those of rank first_rank, of the next one, and so on. The last of them has
  // what is left, in rows that lie close together.
  TensorView y;
  int64_t first_rank = 0;
  uint32_t* progress = nullptr;  // as of AddSums
};
// float32 or bfloat16, the same in both. INVALID_ARGUMENT on shapes.
absl::Status PlaceColumns(const PlaceColumnsParams& params, cudaStream_t stream);

}  // namespace kvasir::kernels
