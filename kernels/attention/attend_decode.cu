// Decode attention on Hopper: one query a row, the heads of a KV group together.
//
// A unit is a run of a row's items (row_items.h). Blocks stay on the GPU and take units in turn.
// In a block, the producer warp resolves pages and has the copy engine bring them, several stages
// ahead; two warpgroups take the pages in turn. For a page of 64 tokens a warpgroup computes
//
//   S[64 tokens, 8 heads] = K[64, d] q^T            M = tokens: nothing is wasted on padding but
//   P = exp2(scale S - max)                         heads up to 8
//   O[d, 8 heads] += V^T[d, 64] P                   M = head dimension
//
// and keeps (max, sum, O) of the pages it took. They go to the workspace; a second kernel merges
// them in order.
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kConsumers = static_cast<int>(kPartsPerUnit);  // warpgroups
constexpr int kThreads = kConsumers * kGroupThreads + kWarpThreads;
constexpr int kHeads = 8;  // columns of the products; a KV head has up to so many query heads
constexpr int kRingBytes = 192 * 1024;

struct DecodeParams : AttendLaunch {
  float* partials = nullptr;
};

template <int kHeadDim>
struct alignas(1024) SharedMemory {
  using Shape = PageShape<kHeadDim>;
  using Ring = PageRing<kHeadDim, kRingBytes / Shape::kPageBytes>;
  struct Consumer {
    std::byte query[Shape::kHalves * hopper::kSwizzledGroupBytes];  // [8 heads][64] halves
    std::byte weights[hopper::kSwizzledGroupBytes];                 // P: [8 heads][64 tokens]
  };
  Ring ring;
  alignas(1024) Consumer consumers[kConsumers];
  float exchange[kConsumers][4][kHeads];  // between the warps of a warpgroup
};

// The part of a row that unit `id` is. Units of all rows lie side by side, so that the first units
// of every row are spread over the GPU. An empty run: the row has no such unit.
__device__ PageRun RunOfUnit(const DecodeParams& p, int64_t id) {
  PageRun run = WholeRow(p, id % p.num_rows);
  const int64_t per_unit = ItemsPerUnit(run.items.num_items);
  run.begin = id / p.num_rows * per_unit;
  run.end = min(run.begin + per_unit, run.items.num_items);
  return run;
}

template <int kHeadDim>
__device__ void Produce(const DecodeParams& p, const KvTensorMaps& maps,
                        SharedMemory<kHeadDim>& shared) {
  RingPosition<SharedMemory<kHeadDim>::Ring::kStages> at;
  for (int64_t id = blockIdx.x; id < p.num_rows * kMaxDecodeUnits; id += gridDim.x) {
    ProducePages(p, maps, RunOfUnit(p, id), shared.ring, at);
  }
}

// --- the consumer warpgroups ---

// What a thread holds of a warpgroup's state: two heads (columns), and of O the rows that wgmma
// gives it.
template <int kHeadDim>
struct ThreadState {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of the scaled logits, times log2(e)
  float sum[2] = {0, 0};                            // of this thread's tokens only
  float out[PageShape<kHeadDim>::kHalves][4] = {};
};

// The group's queries as wgmma wants them; rows of absent heads are zero.
template <int kHeadDim>
__device__ void LoadQuery(const DecodeParams& p, const PageRun& run, const ThreadPlace& me,
                          std::byte* to) {
  constexpr int kChunks = kHeads * kHeadDim * 2 / 16;
  const int64_t kv_head = run.row % p.kv.layout.num_kv_heads;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const auto* from = reinterpret_cast<const std::byte*>(
      p.q + (run.block.first_row * heads + kv_head * p.group) * kHeadDim);
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
  using Shape = PageShape<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int half = step / 4;
    const int offset = step % 4 * 32;  // 16 values
    hopper::Wgmma64x8<hopper::Major::kK>(
        s, hopper::Advance(hopper::TileDescriptor(keys + half * Shape::kBoxBytes), offset),
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
      value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
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

template <int kHeadDim>
__device__ void AddValues(const std::byte* values, const std::byte* weights,
                          float (&out)[PageShape<kHeadDim>::kHalves][4]) {
  using Shape = PageShape<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int half = 0; half < Shape::kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < static_cast<int>(kPageTokens) / 16; ++step) {
      hopper::Wgmma64x8<hopper::Major::kMN>(
          out[half],
          hopper::Advance(hopper::TileDescriptor(values + half * Shape::kBoxBytes),
                          step * 16 * hopper::kSwizzledRowBytes),
          hopper::Advance(hopper::TileDescriptor(weights), step * 32), true);
    }
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

template <int kHeadDim>
__device__ void AttendToPage(const DecodeParams& p, SharedMemory<kHeadDim>& shared,
                             const ThreadPlace& me, int stage, ThreadState<kHeadDim>& state) {
  const uint64_t mask = shared.ring.masks[stage];
  if (mask == 0) return;
  auto& mine = shared.consumers[me.consumer];
  float s[4] = {};
  Logits<kHeadDim>(shared.ring.keys(stage), mine.query, s);
  const bool attended[2] = {(mask >> me.row & 1) != 0, (mask >> (me.row + 8) & 1) != 0};
  for (int i = 0; i < 4; ++i) s[i] = attended[i / 2] ? s[i] * p.scale * kLog2E : kMinusInfinity;
  float page_max[2];
  ColumnMax(me, shared.exchange[me.consumer], s, page_max);
  if (mask != ~uint64_t{0}) ZeroMaskedValues(shared.ring, stage, mask, me.thread, kGroupThreads);
  float offset[2];  // what the exponent is relative to: a maximum, or 0 as long as there is no key
  for (int j = 0; j < 2; ++j) {
    const float max = fmaxf(state.max[j], page_max[j]);
    offset[j] = max == kMinusInfinity ? 0.0f : max;
    const float fade = exp2f(state.max[j] - offset[j]);
    state.max[j] = max;
    state.sum[j] *= fade;
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
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
  AddValues<kHeadDim>(shared.ring.values(stage), mine.weights, state.out);
}

// A page's sums lie spread over the warpgroup; the merge kernel wants them whole.
template <int kHeadDim>
__device__ void StorePartial(const DecodeParams& p, SharedMemory<kHeadDim>& shared,
                             const PageRun& run, int64_t unit, const ThreadPlace& me,
                             ThreadState<kHeadDim>& state) {
  float(*warp_sum)[kHeads] = shared.exchange[me.consumer];
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
  const int64_t part = unit * kConsumers + me.consumer;
  const int64_t first =
      ((run.row * kMaxDecodeUnits * kConsumers + part) * p.group) * (kHeadDim + 2);
  for (int j = 0; j < 2; ++j) {
    if (me.column + j >= p.group) continue;
    float* partial = p.partials + first + (me.column + j) * (kHeadDim + 2);
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
  Synchronize(me);
}

template <int kHeadDim>
__device__ void Consume(const DecodeParams& p, SharedMemory<kHeadDim>& shared) {
  const ThreadPlace me = MyPlace();
  RingPosition<SharedMemory<kHeadDim>::Ring::kStages> at;
  for (int64_t id = blockIdx.x; id < p.num_rows * kMaxDecodeUnits; id += gridDim.x) {
    const PageRun run = RunOfUnit(p, id);
    if (run.begin >= run.end) continue;
    LoadQuery<kHeadDim>(p, run, me, shared.consumers[me.consumer].query);
    ThreadState<kHeadDim> state;
    for (int64_t item = run.begin; item < run.end; ++item, at.Next()) {
      if ((item - run.begin) % kConsumers != me.consumer) continue;
      hopper::BarrierWait(&shared.ring.full[at.stage], at.parity);
      AttendToPage<kHeadDim>(p, shared, me, at.stage, state);
      ReleaseStage(shared.ring, at.stage);
    }
    StorePartial<kHeadDim>(p, shared, run, id / p.num_rows, me, state);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    AttendDecodeKernel(const __grid_constant__ DecodeParams p,
                       const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) shared.ring.Init(kGroupThreads / kWarpThreads);
  __syncthreads();
  if (threadIdx.x >= kConsumers * kGroupThreads) {
    Produce<kHeadDim>(p, maps, shared);
  } else {
    Consume<kHeadDim>(p, shared);
  }
}

// --- the merge: one block a (row, query head), one thread a value ---

template <int kHeadDim>
__global__ void MergePartialsKernel(const __grid_constant__ DecodeParams p) {
  const int64_t row = blockIdx.x / p.group;
  const int64_t head = blockIdx.x % p.group;
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const QueryBlock block = p.blocks[row / kv_heads];
  const RowItems items = NumberItems(p.headers[row], block.first_position);
  const int64_t parts = NumDecodeUnits(items.num_items) * kConsumers;
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
cudaError_t Launch(const DecodeParams& p, const KvTensorMaps& maps, int num_processors,
                   cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory<kHeadDim>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error = cudaFuncSetAttribute(
          AttendDecodeKernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  AttendDecodeKernel<kHeadDim>
      <<<static_cast<unsigned>(num_processors), kThreads, kSharedBytes, stream>>>(p, maps);
  MergePartialsKernel<kHeadDim>
      <<<static_cast<unsigned>(p.num_rows * p.group), kHeadDim, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchAttendDecode(const AttendLaunch& params, const KvTensorMaps& maps,
                               float* partials, int num_processors, cudaStream_t stream) {
  const DecodeParams p = {params, partials};
  return p.kv.layout.head_dim == 128 ? Launch<128>(p, maps, num_processors, stream)
                                     : Launch<64>(p, maps, num_processors, stream);
}

}  // namespace kvasir::kernels
