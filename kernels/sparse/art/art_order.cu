// The order importance of art: a CTA sorts the listed pages of a row that may stay unread, best
// score first, later page first among equals. Each page is one integer (ranking.h), so no two are
// equal.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/art/art_reading.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 512;

// Sorts greatest first, by all threads: a bitonic sort whose merges begin mirrored, so that all
// comparisons go one way and places past the end count as smallest.
__device__ void Sort(Ranked* values, int count) {
  for (int run = 2; run < 2 * count; run *= 2) {
    for (int half = run / 2; half > 0; half /= 2) {
      __syncthreads();
      for (int pair = static_cast<int>(threadIdx.x);; pair += kThreads) {
        const int in_half = pair & (half - 1);
        const int first = 2 * (pair - in_half) + in_half;
        if (first >= count) break;
        const int second = half == run / 2 ? first + 2 * (half - in_half) - 1 : first + half;
        if (second >= count || values[first] > values[second]) continue;
        const Ranked less = values[first];
        values[first] = values[second];
        values[second] = less;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) OrderKernel(const __grid_constant__ ArtLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  Ranked* const ranked = p.RankedOf(blockIdx.x);
  if (ranked == nullptr) return;
  const Reading reading = PlanReading(p, blockIdx.x);
  const SelectionEntry* const list = p.entries + blockIdx.x * p.capacity;
  const int count = reading.skip_end - reading.skip_begin;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int64_t item = reading.ItemAt(reading.skip_begin + i);
    ranked[i] = Ranked(list[item - reading.run.items.num_sink].score, item);
  }
  Sort(ranked, count);
}

}  // namespace

cudaError_t LaunchArtOrder(const ArtLaunch& p, cudaStream_t stream) {
  return LaunchOverlapped(OrderKernel, static_cast<unsigned>(p.num_rows), kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
