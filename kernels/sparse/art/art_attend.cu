// Decode attention that ends rows early, on Hopper. A CTA takes a row (query tile, KV head). The
// producer warp copies its pages in reading order; a warpgroup attends to them one by one
// (decode_page.cuh) and watches its output.
//
// A watched step is a page, as on the CPU: two items of one page, one of sink or window and one of
// the list, are read one after the other and are one step.
//
// Pages are copied up to kStages ahead. Pages already copied when a row ends were read in vain;
// they count as read.
#include "kernels/attention/decode_page.cuh"
#include "kernels/base/head_dim.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/paged/count_selected.cuh"
#include "kernels/sparse/art/art_reading.cuh"
#include "kernels/sparse/art/unread_bounds.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = kGroupThreads + kWarpThreads;
constexpr int kStages = 4;
constexpr int kNever = 0x7fffffff;

template <int kHeadDim, bool kCoded>
struct alignas(1024) SharedMemory {
  PageRing<kHeadDim, kStages, kCoded> ring;
  DecodeMemory<kHeadDim> consumer;
  WarpExchange exchange;
  int orders[kStages];        // of the pages in the ring
  int stop;                   // the first order that is not needed; kNever: all are
  int steps;                  // pages with tokens, up to the last that may stay unread
  int unread;                 // pages
  float totals[4][kHeads];    // between the warps: sums of weights
  float moves[4][3][kHeads];  // likewise: step, product and square of the probes
  float units[kHeads];        // of the guard's sums
};

// Adds to `sum` the number of pages with tokens of the orders [begin, end). By `threads` threads,
// of which this is number `thread`.
__device__ void CountPages(const ArtLaunch& p, const Reading& reading, int begin, int end,
                           int thread, int threads, int* sum) {
  int own = 0;
  for (int order = begin + thread; order < end; order += threads) {
    if (order == reading.half) continue;
    own += ItemOf(p, reading, reading.ItemAt(order)).mask != 0 ? 1 : 0;
  }
  if (own != 0) atomicAdd(sum, own);
}

// --- the producer warp ---

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void Produce(const ArtLaunch& p, const KvTensorMaps& maps, const Reading& reading,
                        SharedMemory<kHeadDim, kCoded>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  RingPosition<kStages> at;
  for (int first = 0; first < reading.size();) {
    const int end = min(first + kWarpThreads, reading.size());
    ResolvedPage<kPlacement> own;
    if (first + lane < end) {
      own = ResolveItem<kPlacement>(p, maps, reading.run, reading.ItemAt(first + lane));
    }
    int next = end;
    for (int order = first; order < end; ++order) {
      if (__shfl_sync(kAllLanes, own.mask, order - first) == 0) continue;
      int stop = kNever;
      if (lane == 0) {
        hopper::BarrierWait(&shared.ring.empty[at.stage], at.parity ^ 1);
        stop = *const_cast<const volatile int*>(&shared.stop);
      }
      stop = __shfl_sync(kAllLanes, stop, 0);
      if (order >= stop && order < reading.skip_end) {
        next = reading.skip_end;
        break;
      }
      if (lane == order - first) ClaimPage(p, reading.run, own, CopiedTokens(own.mask));
      const ResolvedPage<kPlacement> page = ShareResolved<kPlacement>(own, order - first);
      if (page.mask == 0) continue;  // absent
      if (lane == 0) {
        shared.orders[at.stage] = order;
        shared.ring.masks[at.stage] = page.mask;
        if constexpr (kPlacement != Placement::kCached)
          shared.ring.key_positions[at.stage] = page.positions;
        CopyPage(shared.ring, at.stage, maps, page);
      }
      at.Next();
    }
    first = next;
  }
  if (lane != 0) return;
  hopper::BarrierWait(&shared.ring.empty[at.stage], at.parity ^ 1);
  shared.ring.masks[at.stage] = 0;  // the end
  hopper::BarrierArrive(&shared.ring.full[at.stage]);
}

// --- the warpgroup ---

// The values of the thread's two heads that are watched from page to page. Probes are the elements
// d of the output with d mod 8 in {0, 1}; a lane has elements of one d mod 8 only.
template <int kHeadDim>
struct Watch {
  float total[2] = {0, 0};  // sums of weights
  float max[2] = {kMinusInfinity, kMinusInfinity};
  float length[2] = {0, 0};
  int calm[2] = {0, 0};  // number of calm pages in a row
  float probe[PageShape<kHeadDim>::kHalves][4] = {};
  bool has_previous = false;
};

// Returns the sum over a column's lanes of the warp.
__device__ float SumOverRows(float value) {
  for (int distance = 4; distance < kWarpThreads; distance *= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Writes the sums of weights of the thread's two heads.
template <int kHeadDim, bool kCoded>
__device__ void Totals(SharedMemory<kHeadDim, kCoded>& shared, const ThreadPlace& me,
                       const ThreadState<kHeadDim>& state, float (&totals)[2]) {
  for (int j = 0; j < 2; ++j) {
    const float sum = SumOverRows(state.sum[j]);
    if (me.thread % kWarpThreads < 4) shared.totals[me.warp][me.column + j] = sum;
  }
  Synchronize(me);
  for (int j = 0; j < 2; ++j) {
    totals[j] = 0;
    for (int warp = 0; warp < 4; ++warp) totals[j] += shared.totals[warp][me.column + j];
  }
}

// Called after a page was added. Returns whether the last `patience` pages were calm for all heads.
template <int kHeadDim, bool kCoded>
__device__ bool IsCalm(const ArtLaunch& p, SharedMemory<kHeadDim, kCoded>& shared,
                       const ThreadPlace& me, int64_t patience, const ThreadState<kHeadDim>& state,
                       Watch<kHeadDim>& watch) {
  const ArtOptions& options = p.options;
  const bool raw = options.probe == ArtOptions::Probe::kRaw;
  const bool is_probe = me.thread % kWarpThreads / 4 < 2;
  float totals[2];
  Totals<kHeadDim>(shared, me, state, totals);
  for (int j = 0; j < 2; ++j) {
    const float unit = raw ? 1.0f : 1.0f / totals[j];
    float step = 0, product = 0, square = 0;
#pragma unroll
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        const float before = watch.probe[half][i];
        const float x = state.out[half][i] * unit;
        watch.probe[half][i] = x;
        if (!is_probe) continue;
        step += (x - before) * (x - before);
        product += x * before;
        square += x * x;
      }
    }
    step = SumOverRows(step);
    product = SumOverRows(product);
    square = SumOverRows(square);
    if (me.thread % kWarpThreads >= 4) continue;
    shared.moves[me.warp][0][me.column + j] = step;
    shared.moves[me.warp][1][me.column + j] = product;
    shared.moves[me.warp][2][me.column + j] = square;
  }
  Synchronize(me);
  bool settled = true;
  for (int j = 0; j < 2; ++j) {
    float sums[3] = {};
    for (int warp = 0; warp < 4; ++warp) {
      for (int i = 0; i < 3; ++i) sums[i] += shared.moves[warp][i][me.column + j];
    }
    const float length = sqrtf(sums[2]);
    const float scale = options.scale == ArtOptions::Scale::kRelative ? length : 1.0f;
    const float kept = watch.total[j] / totals[j] * exp2f(watch.max[j] - state.max[j]);
    const auto least = static_cast<float>(kArtNoLength);
    const bool calm = length >= least && watch.length[j] >= least &&
                      sqrtf(sums[0]) < static_cast<float>(options.scale_tolerance) * scale &&
                      1.0f - sums[1] / (length * watch.length[j]) <
                          static_cast<float>(options.direction_tolerance) &&
                      (raw || 1.0f - kept < static_cast<float>(options.mass_tolerance));
    watch.calm[j] = calm && watch.has_previous ? watch.calm[j] + 1 : 0;
    watch.total[j] = totals[j];
    watch.max[j] = state.max[j];
    watch.length[j] = length;
    settled = settled && (me.column + j >= p.group || watch.calm[j] >= patience);
  }
  watch.has_previous = true;
  return __all_sync(kAllLanes, settled);
}

// The guard of a row: for each head, the sums of n exp(b - unit) from each page in order that may
// stay unread to the last.
struct Guard {
  float* sums = nullptr;  // [pages + 1][group]
  bool is_made = false;
};

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void MakeGuard(const ArtLaunch& p, SharedMemory<kHeadDim, kCoded>& shared,
                          const Reading& reading, const ThreadPlace& me, Guard& guard) {
  const int lane = me.thread % kWarpThreads;
  const int pages = reading.skip_end - reading.skip_begin;
  const auto group = static_cast<int>(p.group);
  for (int i = me.warp; i < pages; i += kGroupThreads / kWarpThreads) {
    const int64_t index = reading.ItemAt(reading.skip_begin + i);
    BoundItem<kHeadDim, kPlacement != Placement::kCached>(p, reading.run, index,
                                                          guard.sums + int64_t{i} * group);
  }
  __threadfence_block();
  Synchronize(me);
  for (int g = me.warp; g < group; g += kGroupThreads / kWarpThreads) {
    float unit = kMinusInfinity;
    for (int i = lane; i < pages; i += kWarpThreads) {
      unit = fmaxf(unit, guard.sums[int64_t{i} * group + g]);
    }
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      unit = fmaxf(unit, __shfl_xor_sync(kAllLanes, unit, distance));
    }
    if (!isfinite(unit)) unit = 0;  // differences to it would be NaN
    SumFromTheEnd(guard.sums + g, pages, group, unit);
    if (lane == 0) shared.units[g] = unit;
  }
  __threadfence_block();
  Synchronize(me);
  guard.is_made = true;
}

// Whether the pages from `order` on weigh too little to matter, for all heads.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ bool RestIsSmall(const ArtLaunch& p, SharedMemory<kHeadDim, kCoded>& shared,
                            const Reading& reading, const ThreadPlace& me, int order,
                            const Watch<kHeadDim>& watch, Guard& guard) {
  if (p.options.guard == ArtOptions::Guard::kNone) return true;
  if (!guard.is_made) MakeGuard<kHeadDim, kPlacement>(p, shared, reading, me, guard);
  bool small = true;
  for (int j = 0; j < 2; ++j) {
    const int g = me.column + j;
    if (g >= p.group) continue;
    const float rest = guard.sums[int64_t{order - reading.skip_begin} * p.group + g];
    const float share = rest * expf(shared.units[g] - watch.max[j] / kLog2E) / watch.total[j];
    small = small && share < static_cast<float>(p.options.unread_mass);
  }
  return __all_sync(kAllLanes, small);
}

template <int kHeadDim, bool kCoded>
__device__ void Store(const ArtLaunch& p, SharedMemory<kHeadDim, kCoded>& shared,
                      const PageRun& run, const ThreadPlace& me,
                      const ThreadState<kHeadDim>& state) {
  float totals[2];
  Synchronize(me);  // totals of the last page have been read
  Totals<kHeadDim>(shared, me, state, totals);
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t first = (run.tile.first_row * kv_heads + run.row % kv_heads) * p.group;
  for (int j = 0; j < 2; ++j) {
    const int g = me.column + j;
    if (g >= p.group) continue;
    __nv_bfloat16* out = p.out + (first + g) * kHeadDim;
    const float factor = totals[j] == 0 ? 0.0f : 1.0f / totals[j];
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
      const int d = half * static_cast<int>(kBoxColumns) + me.row;
      out[d] = __float2bfloat16_rn(state.out[half][j] * factor);
      out[d + 8] = __float2bfloat16_rn(state.out[half][j + 2] * factor);
    }
    if (p.lse != nullptr && me.row == 0) {
      p.lse[first + g] = totals[j] == 0 ? kMinusInfinity : state.max[j] / kLog2E + logf(totals[j]);
    }
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void Consume(const ArtLaunch& p, const Reading& reading, bool is_watched,
                        SharedMemory<kHeadDim, kCoded>& shared) {
  const ThreadPlace me = MyPlace();
  const int64_t patience = p.numbers[reading.run.row / p.kv.layout.num_kv_heads].patience;
  LoadQuery<kHeadDim, kPlacement>(p, reading.run.row, reading.run.tile.first_row,
                                  {.end = static_cast<int>(p.group)}, me, shared.consumer.query);
  ThreadState<kHeadDim> state;
  Watch<kHeadDim> watch;
  Guard guard = {.sums = p.unread + reading.run.row * (p.kv.max_blocks_per_slot + 1) * p.group};
  int stop = kNever;
  RingPosition<kStages> at;
  for (;; at.Next()) {
    hopper::BarrierWait(&shared.ring.full[at.stage], at.parity);
    if (shared.ring.masks[at.stage] == 0) break;
    const int order = shared.orders[at.stage];
    if (order < stop || order >= reading.skip_end) {
      AttendToPage<kHeadDim, kPlacement>(p, shared.ring, shared.consumer, shared.exchange, me,
                                         at.stage, state);
      const int next = order + 1;
      const bool is_page = order >= reading.first && order != reading.half;
      if (is_watched && is_page && next < reading.skip_end &&
          IsCalm<kHeadDim>(p, shared, me, patience, state, watch) && reading.MaySkip(next) &&
          RestIsSmall<kHeadDim, kPlacement>(p, shared, reading, me, next, watch, guard)) {
        stop = next;
        if (me.thread == 0) *const_cast<volatile int*>(&shared.stop) = stop;
      }
    }
    ReleaseStage(shared.ring, at.stage);
  }
  Store<kHeadDim>(p, shared, reading.run, me, state);
  CountPages(p, reading, min(stop, reading.skip_end), reading.skip_end, me.thread, kGroupThreads,
             &shared.unread);
  Synchronize(me);
  if (me.thread == 0) {
    p.counts[reading.run.row].unread_pages = max(0, shared.unread - (kStages - 1));
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__global__ void __launch_bounds__(kThreads, 1)
    AttendArtKernel(const __grid_constant__ ArtLaunch p,
                    const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim, kCoded>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  Reading reading = PlanReading(p, blockIdx.x);
  reading.ranked = p.RankedOf(blockIdx.x);
  if (threadIdx.x == 0) {
    shared.ring.Init(kGroupThreads / kWarpThreads);
    shared.stop = kNever;
    shared.steps = 0;
    shared.unread = 0;
  }
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  CountPages(p, reading, reading.first, reading.skip_end, thread, kThreads, &shared.steps);
  __syncthreads();
  const int64_t patience = p.numbers[blockIdx.x / p.kv.layout.num_kv_heads].patience;
  const bool is_watched = reading.skip_begin < reading.skip_end && shared.steps >= patience + 3;
  if (thread >= kGroupThreads) {
    Produce<kHeadDim, kPlacement>(p, maps, reading, shared);
    const int64_t row = reading.run.row;
    CountRow(p.headers[row], p.entries + row * p.capacity, reading.run.tile, p.counts[row]);
  } else {
    Consume<kHeadDim, kPlacement>(p, reading, is_watched, shared);
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
cudaError_t Launch(const ArtLaunch& p, const KvTensorMaps& maps, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory<kHeadDim, kCoded>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error =
          AllowSharedBytes(AttendArtKernel<kHeadDim, kPlacement, kCoded>, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(AttendArtKernel<kHeadDim, kPlacement, kCoded>,
                          static_cast<unsigned>(p.num_rows), kThreads, kSharedBytes, stream, p,
                          maps);
}

}  // namespace

cudaError_t LaunchAttendArt(const ArtLaunch& p, const KvTensorMaps& maps, cudaStream_t stream) {
  return ForHeadDim(p.kv.layout.head_dim, [&]<int kHeadDim>() {
    const auto launch = [&]<bool kCoded>() {
      return p.rope.on() ? Launch<kHeadDim, Placement::kCompact, kCoded>(p, maps, stream)
                         : Launch<kHeadDim, Placement::kCached, kCoded>(p, maps, stream);
    };
    return IsQuantized(p.kv.layout.dtype) ? launch.template operator()<true>()
                                          : launch.template operator()<false>();
  });
}

}  // namespace kvasir::kernels
