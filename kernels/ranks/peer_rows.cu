// Sums and maxima of rows among peers. A CTA takes a part of a row in a turn: each of its threads
// writes its values to all peers, waits until the same values of all peers have come, and joins
// them.
//
// A part is where the CTA's lines are, whatever row it is of. Turns of the CTA have numbers, and
// two turns have lines of their own. A CTA that has begun turn n + 2 has got a line of turn n + 1
// from each peer, which that CTA wrote after all its threads had read their lines of turn n.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/ranks/patience.cuh"
#include "kernels/ranks/peer_line.cuh"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // of a thread in a turn
static_assert(kPeerRowLinesOfCta == kThreads * kWords);

template <typename Value>
struct PeerRowsLaunch {
  PeerSumEnd end;
  RankRows<Value> rows;
};

template <typename Value>
constexpr int kWordsOfValue = static_cast<int>(sizeof(Value) / sizeof(uint32_t));
template <typename Value>
constexpr int kValues = kWords / kWordsOfValue<Value>;  // of a thread in a turn
template <typename Value>
constexpr int kPartValues = kThreads* kValues<Value>;

// Unsigned: sums may wrap around.
__device__ inline void Join(int64_t& value, int64_t other) {
  value = static_cast<int64_t>(static_cast<uint64_t>(value) + static_cast<uint64_t>(other));
}
__device__ inline void Join(uint32_t& value, uint32_t other) { value = max(value, other); }

template <typename Value>
class Turns {
 public:
  __device__ explicit Turns(const PeerSumEnd& end) : end_(end), turn_(end.row_turns[blockIdx.x]) {}

  // Makes values[0, count) one over the ranks. Returns whether all peers came, to all threads.
  // REQUIRES: 1 <= count <= kPartValues.
  __device__ bool Take(Value* values, int count) {
    ++turn_;
    const int thread = static_cast<int>(threadIdx.x);
    Value own[kValues<Value>] = {};
    const int mine = min(kValues<Value>, (count - thread + kThreads - 1) / kThreads);
#pragma unroll
    for (int i = 0; i < kValues<Value>; ++i) {
      if (i < mine) own[i] = values[i * kThreads + thread];
    }
    const int words = mine * kWordsOfValue<Value>;
    Send(own, words);
    const bool came = Await(own, words);
#pragma unroll
    for (int i = 0; i < kValues<Value>; ++i) {
      if (i < mine) values[i * kThreads + thread] = own[i];
    }
    return __syncthreads_and(came) != 0;  // all threads have read their lines
  }

  // After the last turn, by all threads.
  __device__ void End() const {
    if (threadIdx.x == 0) end_.row_turns[blockIdx.x] = turn_;
  }

 private:
  // Offset of a rank's lines for this thread in an inbox.
  __device__ int64_t LinesOf(int rank) const {
    return ((turn_ & 1) * end_.num_ranks + rank) * kPeerRowLines + blockIdx.x * kPeerRowLinesOfCta +
           threadIdx.x;
  }

  // Every rank starts with a different peer, so that no peer is written by all at once.
  __device__ void Send(const Value (&own)[kValues<Value>], int words) const {
    for (int step = 1; step < end_.num_ranks; ++step) {
      const int peer = (end_.rank + step) % end_.num_ranks;
      uint64_t* const lines = end_.row_inboxes[peer] + LinesOf(end_.rank);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (w >= words) continue;
        const auto bits = static_cast<uint64_t>(own[w / kWordsOfValue<Value>]);
        SendLine(lines[w * kThreads],
                 static_cast<uint32_t>(bits >> (w % kWordsOfValue<Value> * 32)), turn_);
      }
    }
  }

  // Joins the peers' values to the own ones, peer by peer: the lines of all at once would take all
  // registers.
  __device__ bool Await(Value (&own)[kValues<Value>], int words) const {
    Patience patience(end_);
    for (int step = 1; step < end_.num_ranks; ++step) {
      const int peer = (end_.rank + step) % end_.num_ranks;
      uint64_t* const lines = end_.row_inboxes[end_.rank] + LinesOf(peer);
      uint32_t came[kWords] = {};
      for (bool all = false; !all;) {
        all = true;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if (w >= words) continue;
          const uint64_t line = LookAtLine(lines[w * kThreads]);
          came[w] = WordOf(line);
          all = all && CallOf(line) == turn_;
        }
        if (!all && patience.IsOver()) return false;
      }
      // Values that do not exist come as zeros and go nowhere.
#pragma unroll
      for (int i = 0; i < kValues<Value>; ++i) {
        uint64_t bits = 0;
#pragma unroll
        for (int w = 0; w < kWordsOfValue<Value>; ++w) {
          bits |= uint64_t{came[i * kWordsOfValue<Value> + w]} << (w * 32);
        }
        Join(own[i], static_cast<Value>(bits));
      }
    }
    return true;
  }

  const PeerSumEnd& end_;
  uint32_t turn_;
};

// CTAs take parts in turn, from row to row.
template <typename Value>
__global__ void __launch_bounds__(kThreads)
    PeerRowsKernel(const __grid_constant__ PeerRowsLaunch<Value> p) {
  __shared__ int32_t counts[kThreads];  // of some rows
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const RankRows<Value>& rows = p.rows;
  Turns<Value> turns(p.end);
  unsigned next = blockIdx.x;  // the CTA's part, counted from the row's first
  for (int64_t first = 0; first < rows.rows; first += kThreads) {
    __syncthreads();  // the counts before have been read
    if (const int64_t row = first + threadIdx.x; row < rows.rows) {
      counts[threadIdx.x] =
          rows.counts == nullptr ? static_cast<int32_t>(rows.stride) : rows.counts[row];
    }
    __syncthreads();
    const int64_t end = min(rows.rows, first + kThreads);
    for (int64_t row = first; row < end; ++row) {
      const int count = counts[row - first];
      const auto parts =
          static_cast<unsigned>((count + kPartValues<Value> - 1) / kPartValues<Value>);
      for (; next < parts; next += gridDim.x) {
        const int begin = static_cast<int>(next) * kPartValues<Value>;
        if (!turns.Take(rows.values + row * rows.stride + begin,
                        min(kPartValues<Value>, count - begin))) {
          return;
        }
      }
      next -= parts;
    }
  }
  turns.End();
}

template <typename Value>
absl::Status Launch(const PeerSumEnd& end, const RankRows<Value>& rows, cudaStream_t stream) {
  if (end.num_ranks > kMaxPeers) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows of ", end.num_ranks, " ranks; at most ", kMaxPeers));
  }
  const int64_t parts = rows.rows * ((rows.stride + kPartValues<Value> - 1) / kPartValues<Value>);
  if (parts == 0) return absl::OkStatus();
  const auto ctas = static_cast<unsigned>(std::min(kPeerRowCtas, parts));
  const PeerRowsLaunch<Value> launch = {.end = end, .rows = rows};
  return CudaStatus(LaunchOverlapped(PeerRowsKernel<Value>, ctas, kThreads, 0, stream, launch),
                    "launching rows of peers");
}

}  // namespace

absl::Status SumRows(const PeerSumEnd& end, const RankRows<int64_t>& rows, cudaStream_t stream) {
  return Launch(end, rows, stream);
}

absl::Status MaxRows(const PeerSumEnd& end, const RankRows<uint32_t>& rows, cudaStream_t stream) {
  return Launch(end, rows, stream);
}

}  // namespace kvasir::kernels
