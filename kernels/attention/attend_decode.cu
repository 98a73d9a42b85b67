// Decode attention on Hopper: one query a row, the heads of a KV group together.
//
// A unit is a run of a row's items (decode_plan.h). Blocks stay on the GPU and take units in turn.
// In a block, the producer warp resolves pages and has the copy engine bring them, several stages
// ahead; two warpgroups take the pages in turn. For a page of 64 tokens a warpgroup computes
//
//   S[64 tokens, 8 heads] = K[64, d] q^T            M = tokens: nothing is wasted on padding but
//   P = exp2(scale S - max)                         heads up to 8
//   O[d, 8 heads] += V^T[d, 64] P                   M = head dimension
//
// and keeps (max, sum, O) of the pages it took. They go to the workspace; a second kernel merges
// them in order.
#include <cuda_bf16.h>

#include "kernels/attention/attend_decode.h"
#include "kernels/attention/decode_plan.h"
#include "kernels/base/hopper.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kConsumers = 2;       // warpgroups
constexpr int kThreads = kConsumers * kGroupThreads + kWarpThreads;
constexpr int kHeads = 8;  // columns of the products; a KV head has up to so many query heads
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinusInfinity = -INFINITY;

template <int kHeadDim>
struct Config {
  static constexpr int kHalves = kHeadDim / kBoxColumns;
  static constexpr int kBoxBytes = kPageTokens * hopper::kSwizzledRowBytes;
  static constexpr int kPageBytes = 2 * kHalves * kBoxBytes;
  static constexpr int kStages = 192 * 1024 / kPageBytes;
  static constexpr int kQueryBytes = kHalves * hopper::kSwizzledGroupBytes;
  static constexpr int kSteps = kHeadDim / 16;  // of the product with K
};

// K half 0, K half 1, V half 0, V half 1: boxes of 64 tokens x 64 values.
template <int kHeadDim>
struct alignas(1024) SharedMemory {
  using C = Config<kHeadDim>;
  struct Consumer {
    std::byte query[C::kQueryBytes];                 // [halves][8 heads][64], swizzled
    std::byte weights[hopper::kSwizzledGroupBytes];  // P: [8 heads][64 tokens], swizzled
  };
  std::byte pages[C::kStages][C::kPageBytes];
  Consumer consumers[kConsumers];
  float warp_max[kConsumers][4][kHeads];
  uint64_t masks[C::kStages];
  uint64_t full[C::kStages];
  uint64_t empty[C::kStages];
};

// Which row and part of it a block works on: units of all rows side by side, so that the first
// units of every row are spread over the GPU.
struct Unit {
  bool valid = false;  // else the row has no such unit
  int64_t row = 0;
  int64_t index = 0;
  int64_t begin = 0;  // items
  int64_t end = 0;
  QueryBlock block;
  DecodePlan plan;
};

__device__ Unit MakeUnit(const DecodeLaunch& p, int64_t id) {
  Unit unit;
  unit.row = id % p.num_rows;
  unit.index = id / p.num_rows;
  unit.block = p.blocks[unit.row / p.kv.layout.num_kv_heads];
  unit.plan = PlanDecodeRow(p.headers[unit.row], unit.block.first_position);
  unit.begin = unit.index * unit.plan.items_per_unit;
  unit.end = min(unit.begin + unit.plan.items_per_unit, unit.plan.num_items);
  unit.valid = unit.begin < unit.end;
  return unit;
}

// A ring position: stage and the parity of its use.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// --- the producer warp ---

struct ResolvedItem {
  uint64_t mask = 0;  // 0: nothing to read
  int32_t copy_row = 0;
  bool in_host = false;
};

__device__ void RecordAccess(const PagedKv& kv, int64_t index, PageTier tier) {
  if (kv.accesses.last_touched == nullptr) return;
  kv.accesses.last_touched[index] = kv.step;
  if (tier == PageTier::kHost) {
    atomicAdd(&kv.accesses.missed_bytes[index], static_cast<uint32_t>(kv.layout.page_bytes()));
  }
}

__device__ ResolvedItem Resolve(const DecodeLaunch& p, const KvTensorMaps& maps, const Unit& unit,
                                int64_t item_index) {
  ResolvedItem resolved;
  if (item_index >= unit.end) return resolved;
  const KvLayout& layout = p.kv.layout;
  const int64_t head = unit.row % layout.num_kv_heads;
  const DecodeItem item =
      FindDecodeItem(unit.plan, p.headers[unit.row], p.entries + unit.row * p.capacity,
                     unit.block.first_position, item_index);
  if (item.mask == 0) return resolved;
  const int64_t kv_row = p.kv.row(unit.block.slot, item.page);
  PageRef page;
  int64_t index = 0;
  if (kv_row >= 0) {
    index = kv_row * layout.pages_per_block() + layout.page_in_block(p.layer, head);
    page = p.kv.pages[index];
  }
  if (page.tier() == PageTier::kAbsent) {
    p.faults[unit.block.slot] = 1;
    return resolved;
  }
  RecordAccess(p.kv, index, page.tier());
  resolved.mask = item.mask;
  resolved.in_host = page.tier() == PageTier::kHost;
  const std::byte* base = resolved.in_host ? maps.host_base : maps.device_base;
  resolved.copy_row = static_cast<int32_t>((page.page() - base) / layout.row_bytes());
  return resolved;
}

template <int kHeadDim>
__device__ void CopyPage(SharedMemory<kHeadDim>& shared, const KvTensorMaps& maps,
                         const ResolvedItem& item, int stage) {
  using C = Config<kHeadDim>;
  const CUtensorMap* map = item.in_host ? &maps.host : &maps.device;
  hopper::BarrierArriveExpecting(&shared.full[stage], C::kPageBytes);
  for (int side = 0; side < 2; ++side) {
    for (int half = 0; half < C::kHalves; ++half) {
      hopper::CopyBox(shared.pages[stage] + (side * C::kHalves + half) * C::kBoxBytes, map,
                      half * static_cast<int>(kBoxColumns),
                      item.copy_row + side * static_cast<int>(kPageTokens), &shared.full[stage]);
    }
  }
}

template <int kHeadDim>
__device__ void Produce(const DecodeLaunch& p, const KvTensorMaps& maps,
                        SharedMemory<kHeadDim>& shared) {
  constexpr unsigned kAllLanes = 0xffffffff;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  RingPosition<Config<kHeadDim>::kStages> ring;
  for (int64_t id = blockIdx.x; id < p.num_rows * kMaxDecodeUnits; id += gridDim.x) {
    const Unit unit = MakeUnit(p, id);
    if (!unit.valid) continue;
    // Each lane resolves one item of the next 32 while the current ones are copied.
    ResolvedItem next = Resolve(p, maps, unit, unit.begin + lane);
    for (int64_t begin = unit.begin; begin < unit.end; begin += kWarpThreads) {
      const ResolvedItem current = next;
      next = Resolve(p, maps, unit, begin + kWarpThreads + lane);
      const int count = static_cast<int>(min(int64_t{kWarpThreads}, unit.end - begin));
      for (int i = 0; i < count; ++i) {
        ResolvedItem item;
        item.mask = __shfl_sync(kAllLanes, current.mask, i);
        item.copy_row = __shfl_sync(kAllLanes, current.copy_row, i);
        item.in_host = __shfl_sync(kAllLanes, static_cast<int>(current.in_host), i) != 0;
        if (lane == 0) {
          hopper::BarrierWait(&shared.empty[ring.stage], ring.parity ^ 1);
          shared.masks[ring.stage] = item.mask;
          if (item.mask == 0) {
            hopper::BarrierArrive(&shared.full[ring.stage]);
          } else {
            CopyPage(shared, maps, item, ring.stage);
          }
        }
        ring.Next();
      }
    }
  }
}

// --- the consumer warpgroups ---

// What a thread holds of a warpgroup's state: two heads (columns), and of O the rows that wgmma
// gives it.
template <int kHeadDim>
struct ThreadState {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of the scaled logits, times log2(e)
  float sum[2] = {0, 0};                            // of this thread's tokens only
  float out[Config<kHeadDim>::kHalves][4] = {};
};

struct ThreadPlace {
  int consumer;
  int thread;  // in the warpgroup
  int warp;    // in the warpgroup
  int row;     // first row of the thread in a product's 64; the other is 8 further on
  int column;  // first of its two heads
};

__device__ ThreadPlace MyPlace() {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int warp = thread / kWarpThreads;
  const int lane = thread % kWarpThreads;
  return {.consumer = static_cast<int>(threadIdx.x) / kGroupThreads,
          .thread = thread,
          .warp = warp,
          .row = warp * 16 + lane / 4,
          .column = lane % 4 * 2};
}

__device__ void Synchronize(const ThreadPlace& me) {
  hopper::NamedBarrier(1 + me.consumer, kGroupThreads);
}

// The group's queries as wgmma wants them; rows of absent heads are zero.
template <int kHeadDim>
__device__ void LoadQuery(const DecodeLaunch& p, const Unit& unit, const ThreadPlace& me,
                          std::byte* to) {
  constexpr int kChunks = kHeads * kHeadDim * 2 / 16;
  const int64_t kv_head = unit.row % p.kv.layout.num_kv_heads;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const auto* from = reinterpret_cast<const std::byte*>(
      p.q + (unit.block.first_row * heads + kv_head * p.group) * kHeadDim);
  for (int chunk = me.thread; chunk < kChunks; chunk += kGroupThreads) {
    const int head = chunk / (kHeadDim * 2 / 16);
    const int column = chunk % (kHeadDim * 2 / 16) * 16;  // bytes
    uint4 value = {};
    if (head < p.group)
      value = *reinterpret_cast<const uint4*>(from + head * kHeadDim * 2 + column);
    const int half = column / hopper::kSwizzledRowBytes;
    *reinterpret_cast<uint4*>(to + half * hopper::kSwizzledGroupBytes +
                              hopper::SwizzledOffset(head, column % hopper::kSwizzledRowBytes)) =
        value;
  }
  hopper::FenceAsyncProxy();
  Synchronize(me);
}

template <int kHeadDim>
__device__ void Logits(const std::byte* keys, const std::byte* query, float (&s)[4]) {
  using C = Config<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    const int half = step / 4;
    const int offset = step % 4 * 32;  // 16 values
    hopper::Wgmma64x8<hopper::Major::kK>(
        s, hopper::Advance(hopper::TileDescriptor(keys + half * C::kBoxBytes), offset),
        hopper::Advance(hopper::TileDescriptor(query + half * hopper::kSwizzledGroupBytes), offset),
        step > 0);
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

// Maximum of each column over all 64 rows, for the thread's two columns.
__device__ void ColumnMax(const ThreadPlace& me, float (*warp_max)[kHeads], const float (&s)[4],
                          float (&max)[2]) {
  for (int j = 0; j < 2; ++j) {
    float value = fmaxf(s[j], s[j + 2]);
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
    }
    max[j] = value;
  }
  if (me.thread % kWarpThreads < 4) {
    warp_max[me.warp][me.column] = max[0];
    warp_max[me.warp][me.column + 1] = max[1];
  }
  Synchronize(me);
  for (int j = 0; j < 2; ++j) {
    for (int warp = 0; warp < 4; ++warp) max[j] = fmaxf(max[j], warp_max[warp][me.column + j]);
  }
}

// Values of tokens that are not attended to may be anything, NaN too, and 0 times NaN is NaN.
template <int kHeadDim>
__device__ void ZeroMaskedValues(std::byte* values, uint64_t mask, const ThreadPlace& me) {
  using C = Config<kHeadDim>;
  constexpr int kRowChunks = hopper::kSwizzledRowBytes / 16;
  for (int chunk = me.thread; chunk < C::kHalves * kPageTokens * kRowChunks;
       chunk += kGroupThreads) {
    const int token = chunk / kRowChunks % static_cast<int>(kPageTokens);
    if ((mask >> token & 1) == 0) reinterpret_cast<uint4*>(values)[chunk] = uint4{};
  }
}

template <int kHeadDim>
__device__ void AddValues(const std::byte* values, const std::byte* weights,
                          float (&out)[Config<kHeadDim>::kHalves][4]) {
  using C = Config<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int half = 0; half < C::kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < static_cast<int>(kPageTokens) / 16; ++step) {
      hopper::Wgmma64x8<hopper::Major::kMN>(
          out[half],
          hopper::Advance(hopper::TileDescriptor(values + half * C::kBoxBytes),
                          step * 16 * hopper::kSwizzledRowBytes),
          hopper::Advance(hopper::TileDescriptor(weights), step * 32), true);
    }
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

template <int kHeadDim>
__device__ void AttendToPage(const DecodeLaunch& p, SharedMemory<kHeadDim>& shared,
                             const ThreadPlace& me, int stage, ThreadState<kHeadDim>& state) {
  using C = Config<kHeadDim>;
  const uint64_t mask = shared.masks[stage];
  if (mask == 0) return;
  std::byte* keys = shared.pages[stage];
  std::byte* values = keys + C::kHalves * C::kBoxBytes;
  auto& mine = shared.consumers[me.consumer];
  float s[4] = {};
  Logits<kHeadDim>(keys, mine.query, s);
  const bool attended[2] = {(mask >> me.row & 1) != 0, (mask >> (me.row + 8) & 1) != 0};
  for (int i = 0; i < 4; ++i) s[i] = attended[i / 2] ? s[i] * p.scale * kLog2E : kMinusInfinity;
  float page_max[2];
  ColumnMax(me, shared.warp_max[me.consumer], s, page_max);
  if (mask != ~uint64_t{0}) ZeroMaskedValues<kHeadDim>(values, mask, me);
  float offset[2];  // what the exponent is relative to: a maximum, or 0 as long as there is no key
  for (int j = 0; j < 2; ++j) {
    const float max = fmaxf(state.max[j], page_max[j]);
    offset[j] = max == kMinusInfinity ? 0.0f : max;
    const float fade = exp2f(state.max[j] - offset[j]);
    state.max[j] = max;
    state.sum[j] *= fade;
    for (int half = 0; half < C::kHalves; ++half) {
      state.out[half][j] *= fade;
      state.out[half][j + 2] *= fade;
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int j = i % 2;
    const float weight = exp2f(s[i] - offset[j]);
    state.sum[j] += weight;
    const int token = me.row + i / 2 * 8;
    *reinterpret_cast<__nv_bfloat16*>(mine.weights +
                                      hopper::SwizzledOffset(me.column + j, token * 2)) =
        __float2bfloat16_rn(weight);
  }
  hopper::FenceAsyncProxy();
  Synchronize(me);
  AddValues<kHeadDim>(values, mine.weights, state.out);
}

// A page's sums lie spread over the warpgroup; the merge kernel wants them whole.
template <int kHeadDim>
__device__ void StorePartial(const DecodeLaunch& p, SharedMemory<kHeadDim>& shared,
                             const Unit& unit, const ThreadPlace& me,
                             ThreadState<kHeadDim>& state) {
  float(*warp_sum)[kHeads] = shared.warp_max[me.consumer];
  for (float& sum : state.sum) {
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
  }
  Synchronize(me);  // the last reader of warp_max is done
  if (me.thread % kWarpThreads < 4) {
    warp_sum[me.warp][me.column] = state.sum[0];
    warp_sum[me.warp][me.column + 1] = state.sum[1];
  }
  Synchronize(me);
  const int64_t part = unit.index * kConsumers + me.consumer;
  const int64_t first =
      ((unit.row * kMaxDecodeUnits * kConsumers + part) * p.group) * (kHeadDim + 2);
  for (int j = 0; j < 2; ++j) {
    if (me.column + j >= p.group) continue;
    float* partial = p.partials + first + (me.column + j) * (kHeadDim + 2);
    for (int half = 0; half < Config<kHeadDim>::kHalves; ++half) {
      partial[2 + half * kBoxColumns + me.row] = state.out[half][j];
      partial[2 + half * kBoxColumns + me.row + 8] = state.out[half][j + 2];
    }
    if (me.row != 0) continue;
    float sum = 0;
    for (int warp = 0; warp < 4; ++warp) sum += warp_sum[warp][me.column + j];
    partial[0] = state.max[j];
    partial[1] = sum;
  }
  Synchronize(me);
}

template <int kHeadDim>
__device__ void Consume(const DecodeLaunch& p, SharedMemory<kHeadDim>& shared) {
  const ThreadPlace me = MyPlace();
  RingPosition<Config<kHeadDim>::kStages> ring;
  for (int64_t id = blockIdx.x; id < p.num_rows * kMaxDecodeUnits; id += gridDim.x) {
    const Unit unit = MakeUnit(p, id);
    if (!unit.valid) continue;
    LoadQuery<kHeadDim>(p, unit, me, shared.consumers[me.consumer].query);
    ThreadState<kHeadDim> state;
    for (int64_t item = unit.begin; item < unit.end; ++item) {
      if ((item - unit.begin) % kConsumers == me.consumer) {
        hopper::BarrierWait(&shared.full[ring.stage], ring.parity);
        AttendToPage<kHeadDim>(p, shared, me, ring.stage, state);
        __syncwarp();
        if (me.thread % kWarpThreads == 0) hopper::BarrierArrive(&shared.empty[ring.stage]);
      }
      ring.Next();
    }
    StorePartial<kHeadDim>(p, shared, unit, me, state);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    AttendDecodeKernel(const __grid_constant__ DecodeLaunch p,
                       const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config<kHeadDim>::kStages; ++stage) {
      hopper::BarrierInit(&shared.full[stage], 1);
      hopper::BarrierInit(&shared.empty[stage], kGroupThreads / kWarpThreads);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers * kGroupThreads) {
    Produce<kHeadDim>(p, maps, shared);
  } else {
    Consume<kHeadDim>(p, shared);
  }
}

// --- the merge: one block a (row, query head), one thread a value ---

template <int kHeadDim>
__global__ void MergePartialsKernel(const __grid_constant__ DecodeLaunch p) {
  const int64_t row = blockIdx.x / p.group;
  const int64_t head = blockIdx.x % p.group;
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const QueryBlock block = p.blocks[row / kv_heads];
  const DecodePlan plan = PlanDecodeRow(p.headers[row], block.first_position);
  const int64_t parts = plan.num_units() * kConsumers;
  const int64_t stride = p.group * (kHeadDim + 2);
  const float* partials =
      p.partials + (row * kMaxDecodeUnits * kConsumers * p.group + head) * (kHeadDim + 2);
  float max = kMinusInfinity;
  for (int64_t part = 0; part < parts; ++part) max = fmaxf(max, partials[part * stride]);
  const float offset = max == kMinusInfinity ? 0.0f : max;
  float sum = 0;
  float out = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const float* partial = partials + part * stride;
    const float weight = exp2f(partial[0] - offset);
    sum += weight * partial[1];
    out += weight * partial[2 + threadIdx.x];
  }
  const int64_t q_row = block.first_row * kv_heads * p.group + row % kv_heads * p.group + head;
  p.out[q_row * kHeadDim + threadIdx.x] = __float2bfloat16_rn(sum == 0 ? 0.0f : out / sum);
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[q_row] = sum == 0 ? kMinusInfinity : max / kLog2E + logf(sum);
  }
}

template <int kHeadDim>
cudaError_t Launch(const DecodeLaunch& p, const KvTensorMaps& maps, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory<kHeadDim>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error = cudaFuncSetAttribute(
          AttendDecodeKernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  AttendDecodeKernel<kHeadDim>
      <<<static_cast<unsigned>(p.num_processors), kThreads, kSharedBytes, stream>>>(p, maps);
  MergePartialsKernel<kHeadDim>
      <<<static_cast<unsigned>(p.num_rows * p.group), kHeadDim, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchAttendDecode(const DecodeLaunch& p, const KvTensorMaps& maps,
                               cudaStream_t stream) {
  return p.kv.layout.head_dim == 128 ? Launch<128>(p, maps, stream) : Launch<64>(p, maps, stream);
}

}  // namespace kvasir::kernels
