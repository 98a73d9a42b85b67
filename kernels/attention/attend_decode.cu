// Decode attention on Hopper: one query a row, up to 8 heads of a KV group together.
//
// CTAs stay on the GPU and take tasks in turn: some units of a row, as many as the batch has work
// for (decode_tasks.cuh). Larger groups are cut into parts, and the CTAs of each part (blockIdx.y)
// take all tasks: they do so side by side, and pages come from the L2 cache for all parts but one.
// In a CTA, a warp finds tasks and pages ahead, three warps send the pages' tiles, several stages
// ahead (decode_tiles.cuh), and three warpgroups take the tiles in turn (decode_page.cuh). The one
// with a unit's last tile merges their states, while the others go on. The CTA that ends a row's
// last task merges the states of all the row's units. Both merges use an order fixed by the unit,
// so neither a CTA's other work, nor the cut into tasks, nor which task ends last matters.
#include "kernels/attention/decode_page.cuh"
#include "kernels/attention/decode_tiles.cuh"
#include "kernels/attention/for_shape.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/paged/count_selected.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kRingBytes = 192 * 1024;
constexpr int kPartialsAtOnce = 8;
constexpr int kFinder = kThreads / kWarpThreads - 1;  // the warp that finds tasks
constexpr int kCountingWarp = kFinder - 1;            // a sender that copies no whole pages

// A warpgroup's state of a unit and head.
template <int kHeadDim>
struct alignas(16) UnitPartial {
  float values[kHeadDim];
  float max;
  float sums[kGroupThreads / kWarpThreads];  // of its warps
};

template <int kHeadDim, Placement kPlacement, bool kCoded>
struct alignas(1024) SharedMemory {
  using Shape = PageShape<kHeadDim>;
  using Ring = TileRing<kHeadDim, kRingBytes / Shape::kPageBytes, kCoded, kPlacement>;
  // A stage always has the same reader. A barrier tells one use of a stage from the next one, but
  // not from the one after, for which another reader could already wait.
  static_assert(Ring::kStages % kConsumers == 0);
  Ring ring;
  Queue<Task> tasks;
  Queue<Chunk<kPlacement>> chunks;
  DecodeMemory<kHeadDim> consumers[kConsumers];
  WarpExchange exchange[kConsumers];
  // A unit's, by the place of the consumer's tiles in it.
  UnitPartial<kHeadDim> partials[kConsumers][kHeads];
  uint64_t left;              // the consumers that do not merge them have left their partials
  uint64_t merged;            // the partials have been read
  bool ends_row[kConsumers];  // the consumer's task is the last of its row to end

  // Called by one thread, before a __syncthreads.
  __device__ void Init() {
    hopper::BarrierInit(&left, kConsumers - 1);
    hopper::BarrierInit(&merged, 1);
    tasks.Init(kConsumers * kGroupThreads / kWarpThreads);
    chunks.Init(kSenderWarps);
    ring.Init();
  }
};

// Returns the heads of the CTA's part of a group. Volatile, so that the compiler asks again rather
// than keep the answer in registers.
__device__ HeadRange MyHeads(const DecodeParams& p) {
  int part = 0;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(part));
  const int begin = part * p.heads_of_part;
  return {.begin = begin, .end = min(begin + p.heads_of_part, static_cast<int>(p.group))};
}

// Counts what a row attends to, by a warp.
__device__ void Count(const DecodeParams& p, int64_t row) {
  SelectedCounts& counts = p.counts[row];
  if (threadIdx.x % kWarpThreads == 0) counts.unread_pages = 0;
  CountRow(p.headers[row], p.entries + row * p.capacity, p.tiles[row / p.kv.layout.num_kv_heads],
           counts);
}

// Sends the tiles of all tasks, by the warps of the senders.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void SendTiles(const DecodeParams& p, const KvTensorMaps& maps,
                          SharedMemory<kHeadDim, kPlacement, kCoded>& shared) {
  TileSender<kPlacement, typename SharedMemory<kHeadDim, kPlacement, kCoded>::Ring> sender(
      p, maps, shared.ring);
  for (QueuePlace<Chunk<kPlacement>> chunks(shared.chunks);; chunks.Release()) {
    const Chunk<kPlacement>& chunk = chunks.Await();
    const Task& task = chunk.task;
    if (!task.exists()) return;
    for (int unit = 0; unit < task.num_units; ++unit) sender.Send(chunk, unit);
    // Overlaps with the consumers' last tiles.
    const bool is_first = task.first_unit == 0 && chunk.flags.begins && blockIdx.y == 0;
    if (p.counts != nullptr && is_first && threadIdx.x / kWarpThreads == kCountingWarp) {
      Count(p, task.row);
    }
  }
}

// --- the consumer warpgroups ---

// Writes the warpgroup's state, whose sums are spread over its threads, to the place where it is
// merged, once the partials of the unit before have been read.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void LeavePartial(SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                             const ThreadPlace& me, int place, uint32_t parity,
                             ThreadState<kHeadDim>& state) {
  for (float& sum : state.sum) {
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }
  hopper::BarrierWait(&shared.merged, parity ^ 1);
  for (int j = 0; j < 2; ++j) {
    UnitPartial<kHeadDim>& partial = shared.partials[place][me.column + j];
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
      for (int row = 0; row < 2; ++row) {
        const int dim = decltype(shared.ring)::kKeepsCodes
                            ? DimOfSum<kHeadDim>(me, half, row)
                            : half * static_cast<int>(kBoxColumns) + me.row + 8 * row;
        partial.values[dim] = state.out[half][j + 2 * row];
      }
    }
    if (me.thread % kWarpThreads < 4) partial.sums[me.warp] = state.sum[j];
    if (me.thread < 4) partial.max = state.max[j];
  }
  Synchronize(me);
}

// A state of one (row, query head), spread over a warp.
template <int kHeadDim>
struct WarpState {
  struct alignas(kHeadDim / kWarpThreads * 4) Values {
    static constexpr int kDims = kHeadDim / kWarpThreads;
    float of[kDims] = {};
  };

  float max = kMinusInfinity;
  float sum = 0;
  Values values;
};

// Returns combine() of the values of all lanes, in one order.
template <typename Combine>
__device__ float OverLanes(float value, const Combine& combine) {
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Merges `count` partials of one (row, query head), by a warp: head_of(i) is the maximum and sum of
// partial i, values_of(i) the address of its values. Reads kAtOnce of them side by side, because
// each read takes long.
template <int kHeadDim, int kAtOnce, typename HeadOf, typename ValuesOf>
__device__ WarpState<kHeadDim> MergePartials(int count, const HeadOf& head_of,
                                             const ValuesOf& values_of) {
  static_assert(kWarpThreads % kAtOnce == 0 || kAtOnce == kConsumers);  // all of a unit's
  using Values = typename WarpState<kHeadDim>::Values;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  Values parts[kAtOnce];
  const auto read = [&](int from) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      parts[k] =
          from + k < count ? reinterpret_cast<const Values*>(values_of(from + k))[lane] : Values();
    }
  };
  WarpState<kHeadDim> merged;
  float weight = 0;  // of the lane's partial, of 32 at a time
  read(0);
  for (int first = 0; first < count; first += kAtOnce) {
    if (first % kWarpThreads == 0) {
      const float2 own = first + lane < count ? head_of(first + lane) : float2{kMinusInfinity, 0};
      const float max =
          fmaxf(merged.max, OverLanes(own.x, [](float a, float b) { return fmaxf(a, b); }));
      const float offset = max == kMinusInfinity ? 0.0f : max;
      const float fade = exp2f(merged.max - offset);
      weight = exp2f(own.x - offset);
      merged.max = max;
      merged.sum =
          merged.sum * fade + OverLanes(weight * own.y, [](float a, float b) { return a + b; });
      for (float& value : merged.values.of) value *= fade;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float of_part = __shfl_sync(kAllLanes, weight, (first + k) % kWarpThreads);
      for (int d = 0; d < Values::kDims; ++d) merged.values.of[d] += of_part * parts[k].of[d];
    }
    if (first + kAtOnce < count) read(first + kAtOnce);
  }
  return merged;
}

// Writes the result of a query head, by a warp.
template <int kHeadDim>
__device__ void WriteResult(const DecodeParams& p, const Task& task, int head,
                            const WarpState<kHeadDim>& merged) {
  constexpr int kDims = WarpState<kHeadDim>::Values::kDims;
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t to = (task.first_row * kv_heads + task.row % kv_heads) * p.group + head;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const bool is_empty = merged.sum == 0;
  auto* const out = reinterpret_cast<__nv_bfloat162*>(p.out + to * kHeadDim + lane * kDims);
#pragma unroll
  for (int d = 0; d < kDims; d += 2) {
    out[d / 2] = __floats2bfloat162_rn(is_empty ? 0.0f : merged.values.of[d] / merged.sum,
                                       is_empty ? 0.0f : merged.values.of[d + 1] / merged.sum);
  }
  if (p.lse == nullptr || lane != 0) return;
  p.lse[to] = is_empty ? kMinusInfinity : merged.max / kLog2E + logf(merged.sum);
}

// Merges the partials of a unit that the warpgroups left. Writes the result of a row of one unit,
// else the unit's partial.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void MergeUnit(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                          const ThreadPlace& me, const Task& task, int unit) {
  constexpr int kStride = kPartialHead + kHeadDim;
  const HeadRange heads = MyHeads(p);
  const int lane = me.thread % kWarpThreads;
  const int64_t place = task.row * MaxDecodeUnits(p.kv.layout.num_kv_heads) + unit;
  for (int head = me.warp; head < heads.size(); head += kGroupThreads / kWarpThreads) {
    const auto partial = [&](int i) -> const UnitPartial<kHeadDim>& {
      return shared.partials[i][head];
    };
    const WarpState<kHeadDim> merged = MergePartials<kHeadDim, kConsumers>(
        kConsumers,
        [&](int i) {
          const auto& sums = partial(i).sums;
          return float2{partial(i).max, sums[0] + sums[1] + sums[2] + sums[3]};
        },
        [&](int i) { return partial(i).values; });
    if (task.row_units == 1) {
      WriteResult<kHeadDim>(p, task, heads.begin + head, merged);
      continue;
    }
    float* const to = p.memory.partials + (place * p.group + heads.begin + head) * kStride;
    using Values = typename WarpState<kHeadDim>::Values;
    reinterpret_cast<Values*>(to + kPartialHead)[lane] = merged.values;
    if (lane == 0) *reinterpret_cast<float2*>(to) = {merged.max, merged.sum};
  }
  Synchronize(me);
  if (me.thread == 0) hopper::BarrierArrive(&shared.merged);
}

// Called when the partials of the task's units are stored. Returns whether it is the last of its
// row to end; then all partials of the row can be read.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ bool EndsRow(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
                        const ThreadPlace& me, const Task& task) {
  if (task.num_units == task.row_units && gridDim.y == 1) return true;
  bool& ends_row = shared.ends_row[me.consumer];
  if (me.thread == 0) {
    // Also publishes the values of all threads, which passed a barrier.
    uint32_t& arrivals = p.memory.arrivals[task.row];
    ends_row = hopper::AddAndSee(&arrivals, 1) + 1 == task.row_tasks * gridDim.y;
    if (ends_row) arrivals = 0;
  }
  Synchronize(me);
  return ends_row;
}

template <int kHeadDim>
__device__ void MergeRow(const DecodeParams& p, const ThreadPlace& me, const Task& task) {
  constexpr int kStride = kPartialHead + kHeadDim;
  const float* partials =
      p.memory.partials + task.row * MaxDecodeUnits(p.kv.layout.num_kv_heads) * p.group * kStride;
  for (int head = me.warp; head < p.group; head += kGroupThreads / kWarpThreads) {
    const auto partial = [&](int unit) { return partials + (unit * p.group + head) * kStride; };
    WriteResult<kHeadDim>(
        p, task, head,
        MergePartials<kHeadDim, kPartialsAtOnce>(
            task.row_units, [&](int i) { return *reinterpret_cast<const float2*>(partial(i)); },
            [&](int i) { return partial(i) + kPartialHead; }));
  }
}

struct TilesEnd {
  int place = 0;        // of the consumer's tiles in the unit
  bool merges = false;  // the consumer has the unit's last tile
};

// Attends to the consumer's tiles of the unit.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ TilesEnd
AttendToTiles(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared,
              const ThreadPlace& me,
              RingPosition<SharedMemory<kHeadDim, kPlacement, kCoded>::Ring::kStages>& at,
              ThreadState<kHeadDim>& state) {
  auto& ring = shared.ring;
  TileEnds ends = TileEnds::kNothing;
  TilesEnd end;
  for (; ends == TileEnds::kNothing; at.Next(kConsumers)) {
    hopper::BarrierWait(&ring.full[at.stage], at.parity);
    const TileKind kind = ring.kinds[at.stage];
    end.place = ring.places[at.stage];
    ends = ring.ends[at.stage];
    if (kind == TileKind::kTokens) hopper::FenceAsyncProxy();
    AttendToPage<kHeadDim, kPlacement>(p, ring, shared.consumers[me.consumer],
                                       shared.exchange[me.consumer], me, at.stage, state);
    ReleaseStage(ring, at.stage);
  }
  end.merges = ends == TileEnds::kUnit;
  return end;
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void Consume(const DecodeParams& p, SharedMemory<kHeadDim, kPlacement, kCoded>& shared) {
  using Ring = typename SharedMemory<kHeadDim, kPlacement, kCoded>::Ring;
  const ThreadPlace me = MyPlace();
  RingPosition<Ring::kStages> at = {.stage = me.consumer};
  uint32_t parity = 0;
  for (QueuePlace<Task> tasks(shared.tasks);;) {
    const Task task = tasks.Await();
    if (!task.exists()) return;
    tasks.Release();
    LoadQuery<kHeadDim, kPlacement, Ring::kKeepsCodes>(p, task.row, task.first_row, MyHeads(p), me,
                                                       shared.consumers[me.consumer].query);
    for (int i = 0; i < task.num_units; ++i, parity ^= 1) {
      ThreadState<kHeadDim> state;
      const TilesEnd end = AttendToTiles<kHeadDim, kPlacement, kCoded>(p, shared, me, at, state);
      LeavePartial<kHeadDim>(shared, me, end.place, parity, state);
      if (!end.merges) {
        if (me.thread == 0) hopper::BarrierArrive(&shared.left);
        continue;
      }
      hopper::BarrierWait(&shared.left, parity);
      MergeUnit<kHeadDim>(p, shared, me, task, task.first_unit + i);
      const bool ends_task = i + 1 == task.num_units && task.row_units > 1;
      if (ends_task && EndsRow<kHeadDim>(p, shared, me, task)) MergeRow<kHeadDim>(p, me, task);
    }
  }
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__global__ void __launch_bounds__(kThreads, 1)
    AttendDecodeKernel(const __grid_constant__ DecodeParams p,
                       const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim, kPlacement, kCoded>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) shared.Init();
  if (!kCoded && threadIdx.x == kConsumers * kGroupThreads) PrefetchMaps(maps);
  __syncthreads();
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  if (threadIdx.x < kConsumers * kGroupThreads) {
    Consume<kHeadDim, kPlacement, kCoded>(p, shared);
  } else if (threadIdx.x / kWarpThreads == kFinder) {
    TaskFinder<kPlacement>(p, maps, shared.tasks, shared.chunks).Run();
  } else {
    SendTiles<kHeadDim, kPlacement, kCoded>(p, maps, shared);
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
  DecodeParams p = {params, memory, static_cast<int>((params.group + parts - 1) / parts)};
  for (int64_t units = 1; units <= MaxDecodeUnits(params.kv.layout.num_kv_heads); ++units) {
    p.units_at_once[units - 1] = static_cast<uint8_t>(
        DecodeUnitsAtOnce(params.num_rows, units, static_cast<int64_t>(plan.ctas)));
  }
  return ForShape(plan.shape, [&]<int kHeadDim, Placement kPlacement, bool kCoded>() {
    return Launch<kHeadDim, kPlacement, kCoded>(p, plan, maps, stream);
  });
}

}  // namespace kvasir::kernels
