// What the kernel keeps chunks by that ends the first stage of infinitehip (infinitehip_first.cu): one
// block of kSelectThreads threads a row.
#pragma once

#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {

// Scores of a row that are chosen from in shared memory. Others stay where they are.
inline constexpr int64_t kCopiedScores = 8 * 1024;
inline constexpr size_t kCopyBytes = kCopiedScores * sizeof(uint32_t);

// The scores that a row chooses by.
__device__ inline uint32_t* ChosenBy(const InfiniteHipLaunch& p) {
  return p.layer_scores != nullptr ? p.layer_scores : p.chunk_scores;
}

// Makes those of a row out of the scores of its n chunks, and of the rows that choose with it. By
// all threads.
__device__ inline void JoinScores(const InfiniteHipLaunch& p, const DeviceRow& row, int64_t n) {
  if (p.layer_scores == nullptr) return;
  const InfiniteHipLaunch::Rows together = p.Together(row.index);
  for (int64_t i = threadIdx.x; i < n; i += kSelectThreads) {
    uint32_t best = 0;
    for (int64_t head = together.begin; head < together.end; ++head) {
      best = max(best, p.chunk_scores[head * p.max_chunks + i]);
    }
    p.layer_scores[row.index * p.max_chunks + i] = best;
  }
  __syncthreads();
}

// Calls use(place, chunk, score) for the `kept` best of n chunks, ascending; for all of them, with
// the score of 0, where there is room. Returns how many that are. By all threads.
template <typename Use>
__device__ int64_t KeepBest(const uint32_t* scores, int64_t n, int64_t kept, SelectMemory& memory,
                            const Use& use) {
  if (n <= kept) {
    for (int64_t i = threadIdx.x; i < n; i += kSelectThreads) use(i, i, OrderedScore(0));
    return n;
  }
  extern __shared__ uint32_t copied[];  // [kCopiedScores]
  const bool fits = n <= kCopiedScores;
  for (int64_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = scores[i];
  __syncthreads();
  ForEachBest(fits ? copied : scores, n, kept, memory, use);
  return kept;
}

// What a stage before the last left of a row, in this step and in an earlier one.
__device__ inline void RememberKept(const InfiniteHipLaunch& p, const DeviceRow& row,
                                    const RowReuse& reuse, int stage) {
  if (!reuse.remembers()) return;
  __syncthreads();  // it is written
  const int32_t count = p.kept[stage].counts[row.index];
  const int32_t* const begins = p.kept[stage].begins + row.index * p.max_chunks;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
    reuse.items(stage)[i] = begins[i];
  }
  if (threadIdx.x == 0) reuse.remembered().kept[stage] = count;
}
// Nothing where the next stage does not run, either.
__device__ inline void RecallKept(const InfiniteHipLaunch& p, const DeviceRow& row,
                                  const RowReuse& reuse, int stage, int first_stage) {
  const int32_t count = first_stage == stage + 1 ? reuse.remembered().kept[stage] : 0;
  int32_t* const begins = p.kept[stage].begins + row.index * p.max_chunks;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
    begins[i] = reuse.items(stage)[i];
  }
  if (threadIdx.x == 0) p.kept[stage].counts[row.index] = count;
}

}  // namespace kvasir::kernels
