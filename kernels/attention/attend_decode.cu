// Decode attention on Hopper: one query a row, up to 8 heads of a KV group together.
//
// A unit is a share of a row's items (row_items.h). CTAs stay on the GPU and take units in turn.
// Larger groups are cut into parts, and the CTAs of each part (blockIdx.y) take all units: they do
// so side by side, and pages come from the L2 cache for all parts but one. In
// a CTA, the producer warpgroup makes tiles of what the items attend to, several stages ahead
// (decode_tiles.cuh), and three warpgroups take the tiles in turn (decode_page.cuh). The CTA merges
// the states of its warpgroups. The CTA that ends a row's last unit merges the states of all the
// row's units. Both merges use an order fixed by the unit, so neither a CTA's other work nor the
// choice of the last unit matters.
#include "kernels/attention/decode_page.cuh"
#include "kernels/attention/decode_tiles.cuh"
#include "kernels/attention/for_shape.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/paged/count_selected.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kRingBytes = 192 * 1024;
constexpr int kPartialsAtOnce = 16;  // the number of a row's units with eight KV heads
constexpr int kCountingWarp = kThreads / kWarpThreads - 1;  // a producer warp that copies no pages

struct DecodeParams : AttendLaunch {
  DecodeScratch memory;
  int heads_of_part = 0;
};

template <int kHeadDim, Placement kPlacement, bool kCoded>
struct alignas(1024) SharedMemory {
  using Shape = PageShape<kHeadDim>;
  using Ring = TileRing<kHeadDim, kRingBytes / Shape::kPageBytes, kCoded, KeyPositions<kPlacement>>;
  // A stage always has the same reader. A barrier tells one use of a stage from the next one, but
  // not from the one after, for which another reader could already wait.
  static_assert(Ring::kStages % kConsumers == 0);
  Ring ring;
  DecodeMemory<kHeadDim> consumers[kConsumers];
  // By the place of the consumer's tiles in the unit: maximum, sum, values.
  float partials[kConsumers][kHeads][2 + kHeadDim];
  bool ends_row;  // the unit is the last of its row to end
};

// Returns the part of a row that is unit `id`. The first units of all rows have consecutive
// numbers, so they are spread over the GPU. The step is the row's number of units.
__device__ PageRun RunOfUnit(const DecodeParams& p, int64_t id) {
  PageRun run = WholeRow(p, id % p.num_rows);
  run.begin = id / p.num_rows;
  run.step = NumDecodeUnits(run.end, p.kv.layout.num_kv_heads);
  return run;
}
__device__ bool Exists(const PageRun& unit) { return unit.begin < unit.step; }

__device__ int64_t NumUnits(const DecodeParams& p) {
  return p.num_rows * MaxDecodeUnits(p.kv.layout.num_kv_heads);
}

// Returns the heads of the CTA's part of a group. Volatile, so that the compiler asks again rather
// than keep the answer in registers.
__device__ HeadRange MyHeads(const DecodeParams& p) {
  int part = 0;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(part));
  const int begin = part * p.heads_of_part;
  return {.begin = begin, .end = min(begin + p.heads_of_part, static_cast<int>(p.group))};
}

// Counts what the unit's row attends to, by a warp.
__device__ void Count(const DecodeParams& p, const PageRun& run) {
  SelectedCounts& counts = p.counts[run.row];
  if (threadIdx.x % kWarpThreads == 0) counts.unread_pages = 0;
  CountRow(p.headers[run.row], p.entries + run.row * p.capacity, run.tile, counts);
}

// Returns the CTA's next number after `id` that is a unit, or one past the last number. Called by
// whole warps. With short rows most numbers are no unit, so each lane tests one.
__device__ int64_t NextUnit(const DecodeParams& p, int64_t id) {
  const int64_t stride = gridDim.x;
  for (id += stride; id < NumUnits(p); id += kWarpThreads * stride) {
    const int64_t own = id + threadIdx.x % kWarpThreads * stride;
    const unsigned found = __ballot_sync(kAllLanes, own < NumUnits(p) && Exists(RunOfUnit(p, own)));
    if (found != 0) return id + (__ffs(static_cast<int>(found)) - 1) * stride;
  }
  return id;
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void Produce(const DecodeParams& p, const KvTensorMaps& maps,
                        SharedMemory<kHeadDim, kPlacement, kCoded>& shared) {
  TileProducer<kPlacement, typename SharedMemory<kHeadDim, kPlacement, kCoded>::Ring> producer(
      p, maps, shared.ring);
  for (int64_t id = blockIdx.x; id < NumUnits(p);) {
    const PageRun run = RunOfUnit(p, id);
    if (!Exists(run)) {
      id = NextUnit(p, id);
      continue;
    }
    id += gridDim.x;
    producer.Produce(run);
    // Overlaps with the consumers' last tiles.
    const bool is_first = run.begin == 0 && blockIdx.y == 0;
    if (p.counts != nullptr && is_first && threadIdx.x / kWarpThreads == kCountingWarp) {
      Count(p, run);
    }
  }
}

// --- the consumer warpgroups ---

// Writes the warpgroup's state, whose sums are spread over its threads, to the place where the CTA
// merges it.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void LeavePartial(SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                             const ThreadPlace& me, int place, ThreadState<kHeadDim>& state) {
  float(*warp_sum)[kHeads] = shared.consumers[me.consumer].exchange;
  for (float& sum : state.sum) {
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }
  Synchronize(me);  // the last reader of warp_max is done
  if (me.thread % kWarpThreads < 4) {
    warp_sum[me.warp][me.column] = state.sum[0];
    warp_sum[me.warp][me.column + 1] = state.sum[1];
  }
  Synchronize(me);
  for (int j = 0; j < 2; ++j) {
    float* partial = shared.partials[place][me.column + j];
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
      partial[2 + half * kBoxColumns + me.row] = state.out[half][j];
      partial[2 + half * kBoxColumns + me.row + 8] = state.out[half][j + 2];
    }
    if (me.row != 0) continue;
    float sum = 0;
    for (int warp = 0; warp < 4; ++warp) sum += warp_sum[warp][me.column + j];
    partial[0] = state.max[j];
    partial[1] = sum;
  }
}

// A state of one (row, query head), with two neighbours of its values.
struct PartialState {
  float max = kMinusInfinity;
  float sum = 0;
  float2 values = {0, 0};
};
// Merges all partials of one (row, query head), for the values of dimensions `d` and `d` + 1. Reads
// kAtOnce partials side by side, because each read takes long.
template <int kAtOnce>
__device__ PartialState MergePartials(const float* partials, int64_t count, int64_t stride, int d) {
  PartialState merged;
  for (int64_t first = 0; first < count; first += kAtOnce) {
    PartialState parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= count) continue;
      const float* partial = partials + (first + i) * stride;
      parts[i].max = partial[0];
      parts[i].sum = partial[1];
      parts[i].values = *reinterpret_cast<const float2*>(partial + 2 + d);
    }
    float max = merged.max;
#pragma unroll
    for (const PartialState& part : parts) max = fmaxf(max, part.max);
    const float offset = max == kMinusInfinity ? 0.0f : max;
    const float fade = exp2f(merged.max - offset);
    merged = {max, merged.sum * fade, {merged.values.x * fade, merged.values.y * fade}};
#pragma unroll
    for (const PartialState& part : parts) {
      const float weight = exp2f(part.max - offset);
      merged.sum += weight * part.sum;
      merged.values.x += weight * part.values.x;
      merged.values.y += weight * part.values.y;
    }
  }
  return merged;
}
// Calls use(head, d) for every even d of `heads` heads.
template <int kHeadDim, typename Use>
__device__ void ForEachPair(int64_t heads, const Use& use) {
  constexpr int kPairs = kHeadDim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kPairs; i += kConsumers * kGroupThreads) {
    use(i / kPairs, i % kPairs * 2);
  }
}

// Waits for the threads of all consumers.
__device__ void SynchronizeConsumers() {
  hopper::NamedBarrier(1 + kConsumers, kConsumers * kGroupThreads);
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void StorePartial(const DecodeParams& p,
                             const SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                             const PageRun& run) {
  constexpr int64_t kStride = 2 + kHeadDim;
  const HeadRange heads = MyHeads(p);
  SynchronizeConsumers();
  const int64_t share = run.row * MaxDecodeUnits(p.kv.layout.num_kv_heads) + run.begin;
  float* to = p.memory.partials + (share * p.group + heads.begin) * kStride;
  ForEachPair<kHeadDim>(heads.size(), [&](int head, int d) {
    const PartialState merged =
        MergePartials<kConsumers>(shared.partials[0][head], kConsumers, kHeads * kStride, d);
    *reinterpret_cast<float2*>(to + head * kStride + 2 + d) = merged.values;
    if (d == 0) *reinterpret_cast<float2*>(to + head * kStride) = {merged.max, merged.sum};
  });
  SynchronizeConsumers();  // before the next unit's partials are written
}

// Called when the unit's partial is stored. Returns whether it is the last of its row to end; then
// all partials of the row can be read.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ bool EndsRow(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                        const PageRun& run) {
  if (threadIdx.x == 0) {
    // Also publishes the values of all threads, which passed a barrier.
    shared.ends_row = hopper::AddAndSee(&p.memory.arrivals[run.row], 1) + 1 == run.step * gridDim.y;
    if (shared.ends_row) p.memory.arrivals[run.row] = 0;
  }
  SynchronizeConsumers();
  return shared.ends_row;
}

template <int kHeadDim>
__device__ void MergeRow(const DecodeParams& p, const PageRun& run) {
  constexpr int64_t kStride = 2 + kHeadDim;
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const float* partials =
      p.memory.partials + run.row * MaxDecodeUnits(kv_heads) * p.group * kStride;
  const int64_t first = (run.tile.first_row * kv_heads + run.row % kv_heads) * p.group;
  ForEachPair<kHeadDim>(p.group, [&](int head, int d) {
    const PartialState merged =
        MergePartials<kPartialsAtOnce>(partials + head * kStride, run.step, p.group * kStride, d);
    const bool is_empty = merged.sum == 0;
    *reinterpret_cast<__nv_bfloat162*>(p.out + (first + head) * kHeadDim + d) =
        __floats2bfloat162_rn(is_empty ? 0.0f : merged.values.x / merged.sum,
                              is_empty ? 0.0f : merged.values.y / merged.sum);
    if (p.lse == nullptr || d != 0) return;
    p.lse[first + head] = is_empty ? kMinusInfinity : merged.max / kLog2E + logf(merged.sum);
  });
}

// Attends to the consumer's tiles of the unit. Returns their place.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ int AttendToTiles(
    const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
    const ThreadPlace& me,
    RingPosition<SharedMemory<kHeadDim, kPlacement, kCoded>::Ring::kStages>& at,
    ThreadState<kHeadDim>& state) {
  auto& ring = shared.ring;
  for (;; at.Next(kConsumers)) {
    hopper::BarrierWait(&ring.full[at.stage], at.parity);
    const TileKind kind = ring.kinds[at.stage];
    if (kind == TileKind::kEnd) break;
    if (kind == TileKind::kTokens) hopper::FenceAsyncProxy();
    AttendToPage<kHeadDim, kPlacement>(p, ring, shared.consumers[me.consumer], me, at.stage, state);
    ReleaseStage(ring, at.stage);
  }
  const int place = ring.places[at.stage];
  ReleaseStage(ring, at.stage);
  at.Next(kConsumers);
  return place;
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void Consume(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared) {
  const ThreadPlace me = MyPlace();
  RingPosition<SharedMemory<kHeadDim, kPlacement, kCoded>::Ring::kStages> at = {.stage =
                                                                                    me.consumer};
  for (int64_t id = blockIdx.x; id < NumUnits(p);) {
    const PageRun run = RunOfUnit(p, id);
    if (!Exists(run)) {
      id = NextUnit(p, id);
      continue;
    }
    id += gridDim.x;
    LoadQuery<kHeadDim, kPlacement>(p, run, MyHeads(p), me, shared.consumers[me.consumer].query);
    ThreadState<kHeadDim> state;
    const int place = AttendToTiles<kHeadDim, kPlacement, kCoded>(p, shared, me, at, state);
    LeavePartial<kHeadDim>(shared, me, place, state);
    StorePartial<kHeadDim>(p, shared, run);
    if (EndsRow<kHeadDim>(p, shared, run)) MergeRow<kHeadDim>(p, run);
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__global__ void __launch_bounds__(kThreads, 1)
    AttendDecodeKernel(const __grid_constant__ DecodeParams p,
                       const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim, kPlacement, kCoded>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) shared.ring.Init();
  if (!kCoded && threadIdx.x == kConsumers * kGroupThreads) PrefetchMaps(maps);
  __syncthreads();
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  if (threadIdx.x >= kConsumers * kGroupThreads) {
    Produce<kHeadDim, kPlacement, kCoded>(p, maps, shared);
  } else {
    Consume<kHeadDim, kPlacement, kCoded>(p, shared);
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
cudaError_t Launch(const DecodeParams& p, const AttendKernelPlan& plan, const KvTensorMaps& maps,
                   cudaStream_t stream) {
  constexpr int kSharedBytes =
      static_cast<int>(sizeof(SharedMemory<kHeadDim, kPlacement, kCoded>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  const auto kernel = AttendDecodeKernel<kHeadDim, kPlacement, kCoded>;
  if (const cudaError_t error = AllowSharedBytes(kernel, kSharedBytes); error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(kernel, dim3(plan.ctas, plan.parts), kThreads, kSharedBytes, stream, p,
                          maps);
}

}  // namespace

cudaError_t LaunchAttendDecode(const AttendLaunch& params, const AttendKernelPlan& plan,
                               const KvTensorMaps& maps, const DecodeScratch& memory,
                               cudaStream_t stream) {
  const auto parts = static_cast<int64_t>(plan.parts);
  const DecodeParams p = {params, memory, static_cast<int>((params.group + parts - 1) / parts)};
  return ForShape(plan.shape, [&]<int kHeadDim, Placement kPlacement, bool kCoded>() {
    return Launch<kHeadDim, kPlacement, kCoded>(p, plan, maps, stream);
  });
}

}  // namespace kvasir::kernels
