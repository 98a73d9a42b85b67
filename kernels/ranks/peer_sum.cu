// The sum of small messages among peers. Each thread has two elements. It writes them to all peers,
// waits until the same elements of all peers have come, and adds them.
#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/ranks/patience.cuh"
#include "kernels/ranks/peer_line.cuh"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsOfThread = 2;
constexpr int64_t kElementsOfBlock = kThreads * kElementsOfThread;
static_assert(kPeerSumElements / kElementsOfBlock == kPeerSumCounters);

struct PeerSumLaunch {
  PeerSumEnd end;
  const float* x;  // [count]
  BFloat16* y;     // [count]
  int64_t count;   // 1 to kPeerSumElements
};

// Calls use(i) for the thread's elements that exist. Unrolled, because a loop would keep them in
// local memory.
template <typename Use>
__device__ void ForEachElement(int count, const Use& use) {
#pragma unroll
  for (int i = 0; i < kElementsOfThread; ++i) {
    if (i < count) use(i);
  }
}

__global__ void PeerSumKernel(const __grid_constant__ PeerSumLaunch p) {
  // Before the wait, so that the next product starts with its weights where CTAs of the previous
  // kernel have ended.
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const PeerSumEnd& end = p.end;
  const uint32_t call = end.calls[blockIdx.x] + 1;
  const int64_t first = blockIdx.x * kElementsOfBlock + threadIdx.x;
  const int mine = first + kThreads < p.count ? 2 : first < p.count ? 1 : 0;
  // Offset of a rank's lines in an inbox.
  const auto lines_of = [&](int rank) {
    return ((call & 1) * end.num_ranks + rank) * kPeerSumElements + first;
  };
  float own[kElementsOfThread] = {};
  ForEachElement(mine, [&](int i) { own[i] = p.x[first + i * kThreads]; });
  // Every rank starts with a different peer, so that no peer is written by all at once.
  for (int step = 1; step < end.num_ranks; ++step) {
    const int peer = (end.rank + step) % end.num_ranks;
    uint64_t* const lines = end.inboxes[peer] + lines_of(end.rank);
    ForEachElement(mine,
                   [&](int i) { SendLine(lines[i * kThreads], __float_as_uint(own[i]), call); });
  }
  float before[kElementsOfThread] = {};  // read while lines are under way
  ForEachElement(mine, [&](int i) { before[i] = static_cast<float>(p.y[first + i * kThreads]); });

  uint64_t lines[kMaxPeers][kElementsOfThread];
  Patience patience(end);
  bool over = false;
  for (bool all = false; !all && !over; over = !all && patience.IsOver()) {
    all = true;
#pragma unroll
    for (int rank = 0; rank < kMaxPeers; ++rank) {
      if (rank >= end.num_ranks || rank == end.rank) continue;
      ForEachElement(mine, [&](int i) {
        lines[rank][i] = LookAtLine(end.inboxes[end.rank][lines_of(rank) + i * kThreads]);
        all = all && CallOf(lines[rank][i]) == call;
      });
    }
  }

  ForEachElement(mine, [&](int i) {
    float sum = 0;
#pragma unroll
    for (int rank = 0; rank < kMaxPeers; ++rank) {
      if (rank >= end.num_ranks) continue;
      sum += rank == end.rank ? own[i] : __uint_as_float(WordOf(lines[rank][i]));
    }
    if (over) sum = __uint_as_float(0x7fc00000);  // NaN
    p.y[first + i * kThreads] = BFloat16(before[i] + static_cast<float>(BFloat16(sum)));
  });
  __syncthreads();  // all threads have read the count
  if (threadIdx.x == 0) end.calls[blockIdx.x] = call;
}

cudaError_t LaunchPeerSum(const PeerSumLaunch& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.count + kElementsOfBlock - 1) / kElementsOfBlock);
  return LaunchOverlapped(PeerSumKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace

absl::Status PeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                     cudaStream_t stream) {
  ShapeCheck check("peer_sum");
  check.Match("x", x, {"rows", "width"}, DType::kFloat32)
      .Match("y", y, {"rows", "width"}, DType::kBFloat16)
      .Require(x.num_elements() <= kPeerSumElements, "at most 32,768 elements")
      .Require(end.num_ranks <= kMaxPeers, "at most 8 ranks");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (x.num_elements() == 0) return absl::OkStatus();
  const PeerSumLaunch launch = {
      .end = end, .x = x.As<float>(), .y = y.As<BFloat16>(), .count = x.num_elements()};
  return CudaStatus(LaunchPeerSum(launch, stream), "launching peer_sum");
}

}  // namespace kvasir::kernels
