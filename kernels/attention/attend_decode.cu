// Decode attention on Hopper: one query a row, the heads of a KV group together.
//
// A unit is a run of a row's items (row_items.h). Blocks stay on the GPU and take units in turn.
// In a block, the producer warp resolves pages and has the copy engine bring them, several stages
// ahead; three warpgroups take the pages in turn. For a page of 64 tokens a warpgroup computes
//
//   S[64 tokens, 8 heads] = K[64, d] q^T            M = tokens: nothing is wasted on padding but
//   P = exp2(scale S - max)                         heads up to 8
//   O[d, 8 heads] += V^T[d, 64] P                   M = head dimension
//
// and keeps (max, sum, O) of the pages it took. The block merges those of its warpgroups, and a
// second kernel those of a row's units, both in order.
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kConsumers = 3;  // warpgroups
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
  // A stage always has the same reader: barriers tell one use of a stage from the next, not from
  // the one after, which another reader could be waiting for already.
  static_assert(Ring::kStages % kConsumers == 0);
  struct Consumer {
    std::byte query[Shape::kHalves * hopper::kSwizzledGroupBytes];  // [8 heads][64] halves
    std::byte weights[hopper::kSwizzledGroupBytes];                 // P: [8 heads][64 tokens]
  };
  Ring ring;
  alignas(1024) Consumer consumers[kConsumers];
  float exchange[kConsumers][4][kHeads];             // between the warps of a warpgroup
  float partials[kConsumers][kHeads][2 + kHeadDim];  // maximum, sum, values
};

// The part of a row that unit `id` is. Units of all rows lie side by side, so that the first units
// of every row are spread over the GPU. An empty run: the row has no such unit.
__device__ PageRun RunOfUnit(const DecodeParams& p, int64_t id) {
  PageRun run = WholeRow(p, id % p.num_rows);
  const int64_t per_unit = ItemsPerUnit(run.items.num_items, p.kv.layout.num_kv_heads);
  run.begin = id / p.num_rows * per_unit;
  run.end = min(run.begin + per_unit, run.items.num_items);
  return run;
}

__device__ int64_t NumUnits(const DecodeParams& p) {
  return p.num_rows * MaxDecodeUnits(p.kv.layout.num_kv_heads);
}

template <int kHeadDim>
__device__ void Produce(const DecodeParams& p, const KvTensorMaps& maps,
                        SharedMemory<kHeadDim>& shared) {
  RingPosition<SharedMemory<kHeadDim>::Ring::kStages> at;
  for (int64_t id = blockIdx.x; id < NumUnits(p); id += gridDim.x) {
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

// The group's queries; rows of absent heads are zero.
template <int kHeadDim>
__device__ void LoadQuery(const DecodeParams& p, const PageRun& run, const ThreadPlace& me,
                          std::byte* to) {
  const int64_t kv_head = run.row % p.kv.layout.num_kv_heads;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const __nv_bfloat16* first = p.q + (run.block.first_row * heads + kv_head * p.group) * kHeadDim;
  const auto query_of = [&](int head) {
    return head < p.group ? first + head * kHeadDim : nullptr;
  };
  LoadQueryTile<kHeadDim, kHeads>(me, query_of, to);
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

// Leaves the warpgroup's state, whose sums lie spread over its threads, where the block merges it.
template <int kHeadDim>
__device__ void LeavePartial(SharedMemory<kHeadDim>& shared, const ThreadPlace& me,
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
  for (int j = 0; j < 2; ++j) {
    float* partial = shared.partials[me.consumer][me.column + j];
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

// The state of all partials of one (row, query head) together; the value is that of dimension `d`.
struct MergedState {
  float max = kMinusInfinity;
  float sum = 0;
  float value = 0;
};
__device__ MergedState MergePartials(const float* partials, int64_t count, int64_t stride, int d) {
  MergedState merged;
  for (int64_t i = 0; i < count; ++i) merged.max = fmaxf(merged.max, partials[i * stride]);
  const float offset = merged.max == kMinusInfinity ? 0.0f : merged.max;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) {
    const float* partial = partials + i * stride;
    const float weight = exp2f(partial[0] - offset);
    merged.sum += weight * partial[1];
    merged.value += weight * partial[2 + d];
  }
  return merged;
}

// The threads of all consumers wait for each other.
__device__ void SynchronizeConsumers() {
  hopper::NamedBarrier(1 + kConsumers, kConsumers * kGroupThreads);
}

template <int kHeadDim>
__device__ void StorePartial(const DecodeParams& p, const SharedMemory<kHeadDim>& shared,
                             const PageRun& run, int64_t unit) {
  constexpr int64_t kStride = 2 + kHeadDim;
  SynchronizeConsumers();
  float* to =
      p.partials + (run.row * MaxDecodeUnits(p.kv.layout.num_kv_heads) + unit) * p.group * kStride;
  for (int i = static_cast<int>(threadIdx.x); i < p.group * kHeadDim;
       i += kConsumers * kGroupThreads) {
    const int head = i / kHeadDim;
    const int d = i % kHeadDim;
    const MergedState merged =
        MergePartials(shared.partials[0][head], kConsumers, kHeads * kStride, d);
    to[head * kStride + 2 + d] = merged.value;
    if (d != 0) continue;
    to[head * kStride] = merged.max;
    to[head * kStride + 1] = merged.sum;
  }
  SynchronizeConsumers();  // before the next unit's partials come
}

template <int kHeadDim>
__device__ void Consume(const DecodeParams& p, SharedMemory<kHeadDim>& shared) {
  const ThreadPlace me = MyPlace();
  RingPosition<SharedMemory<kHeadDim>::Ring::kStages> at;
  for (int64_t id = blockIdx.x; id < NumUnits(p); id += gridDim.x) {
    const PageRun run = RunOfUnit(p, id);
    if (run.begin >= run.end) continue;
    LoadQuery<kHeadDim>(p, run, me, shared.consumers[me.consumer].query);
    ThreadState<kHeadDim> state;
    for (int64_t item = run.begin; item < run.end; ++item, at.Next()) {
      if (at.stage % kConsumers != me.consumer) continue;
      hopper::BarrierWait(&shared.ring.full[at.stage], at.parity);
      AttendToPage<kHeadDim>(p, shared, me, at.stage, state);
      ReleaseStage(shared.ring, at.stage);
    }
    LeavePartial<kHeadDim>(shared, me, state);
    StorePartial<kHeadDim>(p, shared, run, id / p.num_rows);
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
  cudaGridDependencySynchronize();
  const int64_t row = blockIdx.x / p.group;
  const int64_t head = blockIdx.x % p.group;
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const QueryBlock block = p.blocks[row / kv_heads];
  const RowItems items = NumberItems(p.headers[row], block.first_position);
  const int64_t stride = p.group * (kHeadDim + 2);
  const MergedState merged = MergePartials(
      p.partials + row * MaxDecodeUnits(kv_heads) * stride + head * (kHeadDim + 2),
      NumDecodeUnits(items.num_items, kv_heads), stride, static_cast<int>(threadIdx.x));
  const int64_t q_row = block.first_row * kv_heads * p.group + row % kv_heads * p.group + head;
  p.out[q_row * kHeadDim + threadIdx.x] =
      __float2bfloat16_rn(merged.sum == 0 ? 0.0f : merged.value / merged.sum);
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[q_row] = merged.sum == 0 ? kMinusInfinity : merged.max / kLog2E + logf(merged.sum);
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
  // Its blocks are made ready while the decode kernel ends.
  cudaLaunchAttribute overlap = {.id = cudaLaunchAttributeProgrammaticStreamSerialization};
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t merge = {.gridDim = static_cast<unsigned>(p.num_rows * p.group),
                                    .blockDim = kHeadDim,
                                    .stream = stream,
                                    .attrs = &overlap,
                                    .numAttrs = 1};
  return cudaLaunchKernelEx(&merge, MergePartialsKernel<kHeadDim>, p);
}

}  // namespace

cudaError_t LaunchAttendDecode(const AttendLaunch& params, const KvTensorMaps& maps,
                               float* partials, int num_processors, cudaStream_t stream) {
  const DecodeParams p = {params, partials};
  return p.kv.layout.head_dim == 128 ? Launch<128>(p, maps, num_processors, stream)
                                     : Launch<64>(p, maps, num_processors, stream);
}

}  // namespace kvasir::kernels
