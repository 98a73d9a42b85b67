// Lists made of runs of adjacent tokens (here: blocks), written by the CTA that has chosen them
// (block_select.cuh). For kernels of selectors.
#pragma once

#include "kernels/sparse/common/block_select.cuh"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

// The blocks of tokens that a list is made of, ascending. A block may cross into a second page.
struct BlockList {
  const int32_t* begins;
  const uint32_t* scores;
  int64_t count;
  int64_t tokens;                  // of each block, at most a page
  int64_t end = int64_t{1} << 40;  // the last block ends here at the latest

  __device__ int64_t EndOf(int64_t i) const { return min(begins[i] + tokens, end); }
  __device__ int64_t FirstPage(int64_t i) const { return begins[i] / kPageTokens; }
  __device__ int64_t LastPage(int64_t i) const { return (EndOf(i) - 1) / kPageTokens; }
  // Whether block i is the first one in its first page; and in its last page, where that is
  // another.
  __device__ bool OpensFirst(int64_t i) const { return i == 0 || LastPage(i - 1) != FirstPage(i); }
  __device__ bool OpensLast(int64_t i) const { return LastPage(i) != FirstPage(i); }
  // Returns the entry of a page whose first block is i.
  __device__ SelectionEntry Entry(int64_t page, int64_t i) const {
    const int64_t start = page * kPageTokens;
    uint64_t chosen = 0;
    uint32_t score = 0;
    for (; i < count && begins[i] < start + kPageTokens; ++i) {
      chosen |= TokenMask(begins[i] - start, EndOf(i) - start);
      score = max(score, scores[i]);
    }
    return {.page = page, .chosen = chosen, .live = chosen, .score = ScoreOfOrdered(score)};
  }
};

// Calls store(place, entry) for the entries of the blocks, up to `capacity`. Returns the number
// stored. By all threads.
template <int kThreads = kSelectThreads, typename Store>
__device__ int64_t WriteList(const BlockList& blocks, int64_t capacity, SelectMemory& memory,
                             const Store& store) {
  const auto count = static_cast<uint32_t>(blocks.count);
  const uint32_t share = (count + kThreads - 1) / kThreads;
  const uint32_t begin = min(count, threadIdx.x * share);
  const uint32_t end = min(count, begin + share);
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) own += blocks.OpensFirst(i) + blocks.OpensLast(i);
  const uint32_t before = SumBefore(own, memory.counts);
  if (threadIdx.x == kThreads - 1) memory.item = before + own;
  int64_t place = before;
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) {
    // The entry of the block's first page, then that of its last where that is another.
#pragma unroll 1
    for (int64_t page = blocks.FirstPage(i); page <= blocks.LastPage(i); ++page) {
      if (page == blocks.FirstPage(i) && !blocks.OpensFirst(i)) continue;
      if (place < capacity) store(place, blocks.Entry(page, i));
      ++place;
    }
  }
  __syncthreads();
  return min(int64_t{memory.item}, capacity);
}

}  // namespace kvasir::kernels
