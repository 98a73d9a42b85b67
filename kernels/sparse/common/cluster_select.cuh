// Chooses the best items of a row whose scores come from a cluster of CTAs. Each CTA writes the
// scores of its items to the shared memory of the first CTA, which chooses. For selectors' kernels.
#pragma once

#include <cstdint>

#include "kernels/base/hopper.cuh"
#include "kernels/sparse/common/block_select.cuh"
#include "kernels/sparse/common/few_best.cuh"

namespace kvasir::kernels {

// The items [begin, end) of n that belong to this CTA of the cluster.
struct ClusterShare {
  __device__ explicit ClusterShare(uint32_t n) {
    const uint32_t share = (n + hopper::ClusterBlocks() - 1) / hopper::ClusterBlocks();
    begin = min(n, share * hopper::ClusterRank());
    end = min(n, begin + share);
  }
  uint32_t begin;
  uint32_t end;
};

union ChooseMemory {
  FewMemory few;
  SelectMemory many;
};

// Not inlined, because FewBest takes all registers.
template <int kThreads>
__noinline__ __device__ uint64_t FindCut(const uint32_t* scores, uint32_t n, uint32_t count,
                                         SelectMemory& memory) {
  return CutFinder<kThreads>(scores, n, memory).Find(count);
}

// Calls use(place, item, score) for the `count` best of scores[n] in shared memory, ascending by
// item, or for all items if there are no more than `count`. By the kThreads threads of a CTA.
// Returns the number of items.
template <int kThreads, typename Use>
__device__ uint32_t ChooseBest(const uint32_t* scores, uint32_t n, uint32_t count,
                               ChooseMemory& memory, const Use& use) {
  if (n <= count) {
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) use(i, i, scores[i]);
    return n;
  }
  if (FewBest(scores, n, memory.few).ForEach(count, use)) return count;
  __syncthreads();
  const uint64_t cut = FindCut<kThreads>(scores, n, count, memory.many);
  ForEachFrom<kThreads>(cut, scores, n, memory.many,
                        [&](int64_t place, int64_t item, uint32_t score) {
                          use(static_cast<uint32_t>(place), static_cast<uint32_t>(item), score);
                        });
  return count;
}

}  // namespace kvasir::kernels
