// Ops that the GPUs of a tensor-parallel group run besides those of a communication library: sums
// and maxima that each rank writes straight into the memory of the others, and the arithmetic
// around the library's own sums and gathers. All pointers are device memory. Called by the worker's
// backend. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/base/tensor.h"
#include "kernels/ranks/rank_rows.h"

namespace kvasir::kernels {

inline constexpr int kMaxPeers = 8;
// Most elements of a small sum: 64 KiB as bfloat16, the dtype of the result.
inline constexpr int64_t kPeerSumElements = 32 * 1024;
// Elements that one launch of a large sum adds. Larger messages take several.
inline constexpr int64_t kSlicedSumElements = 8 << 20;

// One rank's end of sums among peers. Constant while graphs with its sums are in use.
//
// Small sums: a line is 8 bytes: an element and the number of its call. It is written and read as a
// whole, so a reader that sees the number has the element, without a fence or a flag. A rank may be
// at most one call ahead of another, because each call needs what the other rank sends. So lines of
// two calls are kept apart, and no more.
//
// Large sums: each rank owns a slice of the elements. The others write their parts of it to the
// owner, which adds them up and writes the rounded sum to all; a flag with the number of the call
// tells that a CTA's part, or its sum, is there. One buffer for all calls is enough: a rank begins
// a call after it got the sums of the last one from all, so all have read what it sent them, and
// sends sums after it got the parts of this one, so all have read the last sums.
//
// Rows of values go in lines, as small sums do, with a half of 4 bytes in each. A call takes as
// many turns as it needs; the CTA of a turn is at most one turn ahead of its peers.
struct PeerSumEnd {
  int rank = 0;
  int num_ranks = 1;  // at most kMaxPeers
  // By rank, this one included: [2][num_ranks][kPeerSumElements] lines, zero before the first call.
  // Each inbox is memory of its rank that all ranks can write.
  uint64_t* inboxes[kMaxPeers] = {};
  // Likewise, of large sums: kSlicedSumBytes, 16-byte aligned, zero before the first call.
  std::byte* slices[kMaxPeers] = {};
  // Likewise, of rows: [2][num_ranks][kPeerRowLines] lines.
  uint64_t* row_inboxes[kMaxPeers] = {};
  // This rank's counters of calls, or of turns, one for each CTA of the kernels:
  // [kPeerSumCounters], [kSlicedSumCtas] and [kPeerRowCtas], zero before the first call.
  uint32_t* calls = nullptr;
  uint32_t* sliced_calls = nullptr;
  uint32_t* row_turns = nullptr;
  // This rank's flag, zero before the first call. It becomes nonzero when waiting for a rank timed
  // out. From then on no sum waits, and all sums are NaN. `gave_up_host` is the same flag in pinned
  // memory, for the host.
  uint32_t* gave_up = nullptr;
  uint32_t* gave_up_host = nullptr;
  int64_t patience_ns = 0;  // longest wait for the peers in each call
};

inline constexpr int64_t kPeerSumInboxLines = 2 * kMaxPeers * kPeerSumElements;
inline constexpr int64_t kPeerSumCounters = 64;
// All CTAs of a large sum wait for their peers in place, so a GPU must hold them at once.
inline constexpr int64_t kSlicedSumCtas = 128;
inline constexpr int64_t kSlicedSumUnit = 8;  // elements that a thread takes at a time
// Parts of all ranks as float32, whose slices are rounded up to units; sums as bfloat16; flags of
// both.
inline constexpr int64_t kSlicedSumPartBytes =
    (kSlicedSumElements + kMaxPeers * kSlicedSumUnit) * 4;
inline constexpr int64_t kSlicedSumBytes =
    kSlicedSumPartBytes + kSlicedSumElements * 2 + 2 * kMaxPeers * kSlicedSumCtas * 4;

// All CTAs wait for their peers in place, and in tests several ranks share a GPU.
inline constexpr int64_t kPeerRowCtas = 64;
inline constexpr int64_t kPeerRowLinesOfCta = 1024;  // 4 KiB of values in each turn
inline constexpr int64_t kPeerRowLines = kPeerRowCtas * kPeerRowLinesOfCta;
inline constexpr int64_t kPeerRowInboxLines = 2 * kMaxPeers * kPeerRowLines;

// y += sum over ranks of their x, in rank order. The sum is rounded to bfloat16, then the result.
// All ranks with the same y get the same bits. x [rows, width] float32, y [rows, width] bfloat16,
// at most kPeerSumElements elements. Every rank calls it with the same shapes in the same order, by
// launch or in a graph. INVALID_ARGUMENT on shapes; INTERNAL with CUDA's error when the launch
// fails. Cost: writes 8 bytes an element to each peer, and takes about the time of one write to
// reach them. Consecutive calls on a stream start together and wait in place, so ranks that share a
// GPU, as in tests, must leave room for each other's calls.
absl::Status PeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                     cudaStream_t stream);

// Like PeerSum, with the same bits, for messages of any size that is a multiple of kSlicedSumUnit.
// x and y are 16-byte aligned. Increments *progress, in pinned memory, with each launch that ends.
// Cost: each rank writes (num_ranks - 1) / num_ranks of the message as float32 and as bfloat16.
absl::Status SlicedPeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                           uint32_t* progress, cudaStream_t stream);

// Replaces each value by its sum, or its largest, over the ranks: the same on all of them, because
// integers are added in any order. Every rank calls it with rows of the same shape and counts in
// the same order, by launch or in a graph. INVALID_ARGUMENT for more than kMaxPeers ranks; INTERNAL
// with CUDA's error when the launch fails. When waiting for a peer timed out, values are
// unspecified. Cost: writes two bytes for each one to each peer; a turn takes about the time of one
// write to reach them, and turns of a CTA are one after another.
absl::Status SumRows(const PeerSumEnd& end, const RankRows<int64_t>& rows, cudaStream_t stream);
absl::Status MaxRows(const PeerSumEnd& end, const RankRows<uint32_t>& rows, cudaStream_t stream);

// y += x, rounded as in PeerSum. x [rows, width] float32, y [rows, width] bfloat16. Increments
// *progress, in pinned memory: the results that the stream waited for before have come.
absl::Status AddSums(const TensorView& x, const TensorView& y, uint32_t* progress,
                     cudaStream_t stream);

struct PlaceColumnsParams {
  TensorView gathered;  // [num_ranks * rows, width]: the columns of rank after rank
  // [rows, columns]: the columns of rank first_rank, of the next rank, and so on. The last of these
  // ranks may have fewer than `width` columns; its rows in `gathered` are then packed.
  TensorView y;
  int64_t first_rank = 0;
  uint32_t* progress = nullptr;  // as in AddSums
};
// Both tensors are float32, or both bfloat16. INVALID_ARGUMENT on shapes.
absl::Status PlaceColumns(const PlaceColumnsParams& params, cudaStream_t stream);

}  // namespace kvasir::kernels
