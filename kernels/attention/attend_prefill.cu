// Prefill attention on Hopper: blocks of up to 64 queries over the pages of their selection.
//
// A thread block serves one selection row (query block, KV head) for two of its query heads, one
// for each warpgroup; both read the same pages. For a page of 64 tokens a warpgroup computes
//
//   S[64 queries, 64 tokens] = Q K^T,  P = exp2(scale S - max),  O[64, d] += P V
//
// with P going from the one product to the other in registers. One pass over the row's pages in
// ascending order of items: no partial results. At grouped positions queries lie in shared memory
// as they see far keys and as they see near ones; a page where neighbourhoods begin is two stages,
// of which each query masks what is on its other side.
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kConsumers = 2;  // warpgroups, each with a query head of its own
constexpr int kThreads = kConsumers * kGroupThreads + kWarpThreads;
constexpr int kRingBytes = 160 * 1024;
constexpr int kQueries = static_cast<int>(kPageTokens);  // rows of the products
constexpr int kElements = 32;                            // of a 64 x 64 tile that a thread holds

template <int kHeadDim, Placement kPlacement>
struct alignas(1024) SharedMemory {
  using Shape = PageShape<kHeadDim>;
  using Ring = PageRing<kHeadDim, kRingBytes / Shape::kPageBytes, KeyPositions<kPlacement>>;
  static constexpr int kPlaces = kPlacement == Placement::kGrouped ? 2 : 1;
  Ring ring;
  // At grouped positions as they see near keys, and as they see far ones.
  alignas(1024) std::byte queries[kConsumers][kPlaces][Shape::kSideBytes];
};

// Of a thread's 32 elements of a tile: row and column relative to its place.
__device__ constexpr int RowOf(int element) { return element / 2 % 2; }  // times 8
__device__ constexpr int ColumnOf(int element) { return element / 4 * 8 + element % 2; }

template <int kHeadDim>
struct ThreadState {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of the scaled logits, times log2(e)
  float sum[2] = {0, 0};                            // of this thread's columns only
  float out[PageShape<kHeadDim>::kHalves][kElements] = {};
};

// Queries of one head, row r at position_of(r) unless they are as cached keys; rows of absent
// queries and heads are zero.
template <int kHeadDim, Placement kPlacement, typename PositionOf>
__device__ void LoadQueries(const AttendLaunch& p, const PageRun& run, int64_t head, bool exists,
                            const ThreadPlace& me, const PositionOf& position_of, std::byte* to) {
  const QueryBlock& block = run.block;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const auto query_of = [&](int row) {
    return exists && row < block.num_rows
               ? p.q + ((block.first_row + row) * heads + head) * kHeadDim
               : nullptr;
  };
  LoadQueryTile<kHeadDim, kQueries>(me, query_of, to);
  if constexpr (kPlacement != Placement::kCached) {
    const auto position = [&](int row) { return row < block.num_rows ? position_of(row) : -1; };
    RotateTile<kHeadDim, kQueries>(p.rope, me.thread, kGroupThreads, position, to);
    Synchronize(me);
  }
}
template <int kHeadDim, Placement kPlacement>
__device__ void LoadQueries(const AttendLaunch& p, const PageRun& run, int64_t head, bool exists,
                            const ThreadPlace& me, SharedMemory<kHeadDim, kPlacement>& shared) {
  const auto load = [&](const auto& position_of, int place) {
    LoadQueries<kHeadDim, kPlacement>(p, run, head, exists, me, position_of,
                                      shared.queries[me.consumer][place]);
  };
  int64_t first = run.block.first_position;
  if constexpr (kPlacement == Placement::kGrouped) {
    load([&](int row) { return p.grouped.FarQuery(first + row); }, 1);
  } else {
    first = QueryPosition(p.headers[run.row], first);
  }
  load([&](int row) { return first + row; }, 0);
}

template <int kHeadDim>
__device__ void Logits(const std::byte* queries, const std::byte* keys, float (&s)[kElements]) {
  using Shape = PageShape<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int box = step / 4 * Shape::kBoxBytes;
    const int offset = step % 4 * 32;  // 16 values
    hopper::Wgmma64x64<hopper::Major::kK>(
        s, hopper::Advance(hopper::TileDescriptor(queries + box), offset),
        hopper::Advance(hopper::TileDescriptor(keys + box), offset), step > 0);
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

// Takes out what no query, or not the row's, attends to. `first_query`: up to where the first row
// sees tokens.
__device__ void Mask(uint64_t mask, int64_t first_token, int64_t first_query, const ThreadPlace& me,
                     float (&s)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int token = me.column + ColumnOf(i);
    const int64_t query = first_query + me.row + 8 * RowOf(i);
    if ((mask >> token & 1) == 0 || first_token + token > query) s[i] = kMinusInfinity;
  }
}

// Takes out what is far. `first_query`: up to where tokens are for the first row.
__device__ void MaskFar(int64_t first_token, int64_t first_query, const ThreadPlace& me,
                        float (&s)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int token = me.column + ColumnOf(i);
    const int64_t query = first_query + me.row + 8 * RowOf(i);
    if (first_token + token <= query) s[i] = kMinusInfinity;
  }
}

__device__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Logits become weights; the state fades by what the maximum has grown.
template <int kHeadDim>
__device__ void Soften(float scale, float (&s)[kElements], ThreadState<kHeadDim>& state) {
  float offset[2];
  for (int i = 0; i < 2; ++i) {
    float max = kMinusInfinity;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (RowOf(e) == i) max = fmaxf(max, s[e]);
    }
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
    max = fmaxf(state.max[i], max * scale);
    offset[i] = max == kMinusInfinity ? 0.0f : max;
    const float fade = exp2f(state.max[i] - offset[i]);
    state.max[i] = max;
    state.sum[i] *= fade;
#pragma unroll
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (RowOf(e) == i) state.out[half][e] *= fade;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    s[e] = exp2f(s[e] * scale - offset[RowOf(e)]);
    state.sum[RowOf(e)] += s[e];
  }
}

template <int kHeadDim>
__device__ void AddValues(const std::byte* values, const float (&weights)[kElements],
                          float (&out)[PageShape<kHeadDim>::kHalves][kElements]) {
  using Shape = PageShape<kHeadDim>;
  uint32_t a[kQueries / 16][4];
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[step][i] = Pack(weights[8 * step + 2 * i], weights[8 * step + 2 * i + 1]);
    }
  }
  hopper::WgmmaFence();
#pragma unroll
  for (int half = 0; half < Shape::kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step) {
      hopper::Wgmma64x64<hopper::Major::kMN>(
          out[half], a[step],
          hopper::Advance(hopper::TileDescriptor(values + half * Shape::kBoxBytes),
                          step * 16 * hopper::kSwizzledRowBytes));
    }
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

// The threads of both consumers wait for each other.
__device__ void SynchronizeConsumers() {
  hopper::NamedBarrier(1 + kConsumers, kConsumers * kGroupThreads);
}

template <int kHeadDim, Placement kPlacement>
__device__ void AttendToPage(const AttendLaunch& p, SharedMemory<kHeadDim, kPlacement>& shared,
                             const QueryBlock& block, const ThreadPlace& me, int stage,
                             ThreadState<kHeadDim>& state) {
  const uint64_t mask = shared.ring.masks[stage];
  if (mask == 0) return;
  const int64_t first_token = shared.ring.first_positions[stage];
  if constexpr (kPlacement != Placement::kCached) {
    RotateKeys(shared.ring, stage, p.rope, static_cast<int>(threadIdx.x),
               kConsumers * kGroupThreads);
    SynchronizeConsumers();
  }
  int64_t first_query = block.first_position;  // up to where it sees tokens
  int place = 0;
  if constexpr (kPlacement == Placement::kGrouped) {
    if (shared.ring.key_positions[stage].near_begin > 0) {
      first_query -= p.grouped.window;
      place = 1;
    }
  }
  float s[kElements];
  Logits<kHeadDim>(shared.queries[me.consumer][place], shared.ring.keys(stage), s);
  const bool whole = mask == ~uint64_t{0};
  if (!whole || first_token + kPageTokens > first_query) {
    Mask(mask, first_token, first_query, me, s);
  }
  if constexpr (kPlacement == Placement::kGrouped) {
    const int64_t far = first_query - p.grouped.window;
    if (place == 0 && first_token < far + block.num_rows) MaskFar(first_token, far, me, s);
  }
  if (!whole) {
    // Both warpgroups write the same zeros, and each waits for its own.
    ZeroMaskedValues(shared.ring, stage, mask, me.thread, kGroupThreads);
    Synchronize(me);
  }
  Soften<kHeadDim>(p.scale * kLog2E, s, state);
  AddValues<kHeadDim>(shared.ring.values(stage), s, state.out);
}

template <int kHeadDim>
__device__ void Store(const AttendLaunch& p, const QueryBlock& block, int64_t head,
                      const ThreadPlace& me, ThreadState<kHeadDim>& state) {
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  for (int i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int row = me.row + 8 * i;
    if (row >= block.num_rows) continue;
    const int64_t index = (block.first_row + row) * heads + head;
    const float factor = sum == 0 ? 0.0f : 1.0f / sum;
    uint32_t* out = reinterpret_cast<uint32_t*>(p.out + index * kHeadDim);
#pragma unroll
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
#pragma unroll
      for (int e = 0; e < kElements; e += 2) {
        if (RowOf(e) != i) continue;
        const int column = half * static_cast<int>(kBoxColumns) + me.column + ColumnOf(e);
        out[column / 2] = Pack(state.out[half][e] * factor, state.out[half][e + 1] * factor);
      }
    }
    if (p.lse != nullptr && me.column == 0) {
      p.lse[index] = sum == 0 ? kMinusInfinity : state.max[i] / kLog2E + logf(sum);
    }
  }
}

template <int kHeadDim, Placement kPlacement>
__global__ void __launch_bounds__(kThreads, 1)
    AttendPrefillKernel(const __grid_constant__ AttendLaunch p,
                        const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  using Shared = SharedMemory<kHeadDim, kPlacement>;
  auto& shared =
      *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) shared.ring.Init(kConsumers * kGroupThreads / kWarpThreads);
  __syncthreads();
  const PageRun run = WholeRow(p, blockIdx.x);
  RingPosition<Shared::Ring::kStages> at;
  if (threadIdx.x >= kConsumers * kGroupThreads) {
    ProducePages<kPlacement>(p, maps, run, shared.ring, at);
    return;
  }
  const ThreadPlace me = MyPlace();
  const int64_t head_in_group = int64_t{blockIdx.y} * kConsumers + me.consumer;
  const bool exists = head_in_group < p.group;
  const int64_t head = run.row % p.kv.layout.num_kv_heads * p.group + head_in_group;
  LoadQueries<kHeadDim, kPlacement>(p, run, head, exists, me, shared);
  ThreadState<kHeadDim> state;
  // At grouped positions an item is one stage or two, and one without tokens is the end.
  for (int64_t item = run.begin; kPlacement == Placement::kGrouped || item < run.end;
       ++item, at.Next()) {
    hopper::BarrierWait(&shared.ring.full[at.stage], at.parity);
    if (kPlacement == Placement::kGrouped && shared.ring.masks[at.stage] == 0) break;
    AttendToPage<kHeadDim, kPlacement>(p, shared, run.block, me, at.stage, state);
    ReleaseStage(shared.ring, at.stage);
  }
  if (exists) Store<kHeadDim>(p, run.block, head, me, state);
}

template <int kHeadDim, Placement kPlacement>
cudaError_t Launch(const AttendLaunch& p, const KvTensorMaps& maps, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory<kHeadDim, kPlacement>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error =
          cudaFuncSetAttribute(AttendPrefillKernel<kHeadDim, kPlacement>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(static_cast<unsigned>(p.num_rows),
                  static_cast<unsigned>((p.group + kConsumers - 1) / kConsumers));
  AttendPrefillKernel<kHeadDim, kPlacement><<<grid, kThreads, kSharedBytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchAttendPrefill(const AttendLaunch& params, const KvTensorMaps& maps,
                                cudaStream_t stream) {
  const bool is_wide = params.kv.layout.head_dim == 128;
  using enum Placement;
  auto* const launch = params.grouped.on()
                           ? (is_wide ? Launch<128, kGrouped> : Launch<64, kGrouped>)
                       : params.rope.on() ? (is_wide ? Launch<128, kCompact> : Launch<64, kCompact>)
                                          : (is_wide ? Launch<128, kCached> : Launch<64, kCached>);
  return launch(params, maps, stream);
}

}  // namespace kvasir::kernels
