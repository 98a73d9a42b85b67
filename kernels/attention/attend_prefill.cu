// Prefill attention on Hopper: tiles of up to 64 queries over the pages of their selection.
//
// A CTA serves one selection row (query tile, KV head) for two of its query heads, one for each
// warpgroup that computes. Both read the same pages. For a page of 64 tokens it computes
//
//   S[64 queries, 64 tokens] = Q K^T,  P = exp2(scale S - max),  O[64, d] += P V
//
// and keeps P in registers between the two products. It makes one pass over the row's pages in
// ascending order of items, without partial results. S of the next page and P V of this one begin
// together. The softmax of the next page starts as soon as its S is there, during P V and the other
// warpgroup's products. A warpgroup's time goes into what it does between its products, so that is
// short: weights are made against a maximum that is already known and seldom changes, the maximum
// is found and P is packed during the exponentials, and the wait for the page after the next comes
// before the wait for S. One word says that a page is attended to in whole, and a warp's uniform
// registers form the descriptors of its operands.
//
// CTAs start head after head of the keys and values: those that run together read the same pages,
// from the L2 cache.
//
// A third warpgroup brings the pages. Where the KV is quantized or keys are cached un-rotated, two
// more decode and rotate them, a page or more ahead of the products. These warpgroups give
// registers to the first two.
//
// The kernel over prepared pages (prepared_pages.h) is that of rotated keys and KV of bfloat16. Its
// queries may still have to be rotated.
//
// With grouped positions shared memory holds the queries twice: as far keys and as near keys see
// them. A page where neighbourhoods begin takes two stages, and in each of them every query masks
// the keys of its other side.
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/for_shape.h"
#include "kernels/attention/prefill_pages.cuh"
#include "kernels/attention/prefill_softmax.cuh"
#include "kernels/base/overlapped_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kConsumers = kPrefillConsumers;

// Loads the queries of one head. Row r is rotated to position_of(r), unless keys are cached
// rotated. Rows of absent queries and heads are zero.
template <int kHeadDim, bool kMayRotate, typename PositionOf>
__device__ void LoadQueries(const AttendLaunch& p, const PageRun& run, int64_t head, bool exists,
                            const ThreadPlace& me, const PositionOf& position_of, std::byte* to) {
  const QueryTile& tile = run.tile;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const auto query_of = [&](int row) {
    return exists && row < tile.num_rows ? p.q + ((tile.first_row + row) * heads + head) * kHeadDim
                                         : nullptr;
  };
  LoadQueryTile<kHeadDim, kQueries>(me, query_of, to);
  if constexpr (kMayRotate) {
    if (!p.rope.on()) return;
    const auto position = [&](int row) { return row < tile.num_rows ? position_of(row) : -1; };
    RotateTile<kHeadDim, kQueries>(p.rope, me.thread, kGroupThreads, position, to);
    Synchronize(me);
  }
}
template <bool kMayRotate, int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void LoadQueries(const AttendLaunch& p, const PageRun& run, int64_t head, bool exists,
                            const ThreadPlace& me,
                            PrefillMemory<kHeadDim, kPlacement, kCoded>& shared) {
  const auto load = [&](const auto& position_of, int place) {
    LoadQueries<kHeadDim, kMayRotate>(p, run, head, exists, me, position_of,
                                      shared.queries[me.consumer][place]);
  };
  int64_t first = run.tile.first_position;
  if constexpr (kPlacement == Placement::kGrouped) {
    load([&](int row) { return p.grouped.FarQuery(first + row); }, 1);
  } else {
    first = QueryPosition(p.headers[run.row], first);
  }
  load([&](int row) { return first + row; }, 0);
}

// Queries in the form of the products. Without preparers they lie in registers, which leaves the
// bandwidth of shared memory to keys and values; then all keys see them at one position.
template <int kHeadDim, bool kInRegisters>
struct Queries {
  static constexpr int kSteps = kHeadDim / 16;

  const std::byte* tiles;  // of the warpgroup, one for each position
  uint32_t parts[kInRegisters ? kSteps : 1][4];

  __device__ Queries(const std::byte* of_group, const ThreadPlace& me) : tiles(of_group) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) {
        const int row = me.row + 8 * (i % 2);
        const int column = 2 * (i / 4 * 16 + me.column + i / 2 % 2 * 8);  // bytes
        const std::byte* const half =
            tiles + column / hopper::kSwizzledRowBytes * PageShape<kHeadDim>::kBoxBytes;
        parts[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(
            half + hopper::SwizzledOffset(row, column % hopper::kSwizzledRowBytes));
      }
    }
  }

  // Begins s = queries times keys, given the descriptor of the keys' tile.
  __device__ void BeginLogits(int place, uint64_t keys, float (&s)[kElements]) const {
    uint64_t tile = hopper::TileDescriptor(tiles + place * PageShape<kHeadDim>::kSideBytes);
    // Without this the descriptors of all steps would be kept, in more registers than there are.
    asm volatile("" : "+l"(tile));
    hopper::WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int offset = step / 4 * PageShape<kHeadDim>::kBoxBytes + step % 4 * 32;  // 16 values
      const uint64_t b = hopper::Advance(keys, offset);
      if constexpr (kInRegisters) {
        hopper::Wgmma64x64<hopper::Major::kK>(s, parts[step], b, step > 0);
      } else {
        hopper::Wgmma64x64<hopper::Major::kK>(s, hopper::Advance(tile, offset), b, step > 0);
      }
    }
    hopper::WgmmaCommit();
  }
};

// Begins out += weights times values, given the descriptor of the values.
template <int kHeadDim>
__device__ void BeginValues(uint64_t values, const RowWeights& weights,
                            float (&out)[kHeadDim / 2]) {
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step) {
    const uint64_t b = hopper::Advance(values, step * 16 * hopper::kSwizzledRowBytes);
    if constexpr (kHeadDim == 128) {
      hopper::Wgmma64x128(out, weights.parts[step], b);
    } else {
      hopper::Wgmma64x64<hopper::Major::kMN>(out, weights.parts[step], b);
    }
  }
  hopper::WgmmaCommit();
}

// A warpgroup that computes, and its current page.
template <int kHeadDim, Placement kPlacement, bool kCoded>
class Consumer {
 public:
  using Shared = PrefillMemory<kHeadDim, kPlacement, kCoded>;

  __device__ Consumer(const AttendLaunch& p, Shared& shared, const PageRun& run,
                      const ThreadPlace& me)
      : p_(p),
        shared_(shared),
        first_position_(run.tile.first_position),
        me_(me),
        queries_(shared.queries[me.consumer][0], me),
        first_keys_(hopper::TileDescriptor(shared.ring.keys(0))),
        first_values_(
            hopper::PairDescriptor<PageShape<kHeadDim>::kBoxBytes>(shared.ring.values(0))) {}

  // Attends to all pages of the row.
  __device__ void Run(ThreadState<kHeadDim>& state) {
    next_ = Await();
    if (next_ == kEnd) return;
    // Two sets: a page's weights are made while the products read those of the page before it.
    RowWeights even, odd;
    float logits[kElements];
    BeginLogits(at_.stage, logits);
    MakeWeights(state, logits, even);
    while (true) {
      if (!Step(state, logits, even, odd)) return;
      if (!Step(state, logits, odd, even)) return;
    }
  }

 private:
  // Waits for the page at at_.
  __device__ PageState Await() {
    hopper::BarrierWait(shared_.Ready(at_.stage), at_.parity);
    return shared_.ring.states[at_.stage];
  }
  // The shuffle tells the compiler that the descriptor is the same in all lanes. Otherwise each
  // lane computes those of all steps, and the products wait until they are in uniform registers.
  __device__ static uint64_t InStage(uint64_t first, int stage) {
    stage = __shfl_sync(kAllLanes, stage, 0);
    return hopper::Advance(first, stage * PageShape<kHeadDim>::kPageBytes);
  }
  // Adds the values of the page whose weights are given, and makes those of the next page. Returns
  // false if there is none.
  __device__ bool Step(ThreadState<kHeadDim>& state, float (&logits)[kElements],
                       const RowWeights& weights, RowWeights& next_weights) {
    const int stage = stage_;
    if (next_ == kEnd) {
      BeginValues<kHeadDim>(InStage(first_values_, stage), weights, state.out);
      hopper::WgmmaWait<0>();
      return false;
    }
    BeginLogits(at_.stage, logits);
    BeginValues<kHeadDim>(InStage(first_values_, stage), weights, state.out);
    const bool is_raised = MakeWeights<1>(state, logits, next_weights);
    hopper::WgmmaWait<0>();  // the values
    ReleaseStage(shared_.ring, stage);
    if (is_raised) Fade(state);
    return true;
  }
  // Turns to the next page: waits for its logits, which have begun before the last kPending
  // products, and makes its weights. The wait for the page after it comes first, under the
  // products.
  template <int kPending = 0>
  __device__ bool MakeWeights(ThreadState<kHeadDim>& state, float (&logits)[kElements],
                              RowWeights& weights) {
    const PageState page = next_;
    stage_ = at_.stage;
    at_.Next();
    next_ = Await();
    hopper::WgmmaWait<kPending>();
    if (page == kMasked) MaskPage(stage_, logits);
    return SoftenRows<kHeadDim>(p_.scale * kLog2E, logits, state, weights);
  }
  __device__ int Place(int stage) const {
    if constexpr (kPlacement == Placement::kGrouped) {
      return shared_.ring.key_positions[stage].near_begin > 0 ? 1 : 0;
    }
    return 0;
  }
  __device__ void BeginLogits(int stage, float (&logits)[kElements]) {
    queries_.BeginLogits(Place(stage), InStage(first_keys_, stage), logits);
  }

  __device__ void MaskPage(int stage, float (&s)[kElements]) {
    const uint64_t mask = shared_.ring.masks[stage];
    // The last of the page's tokens that the first row sees.
    int64_t last = first_position_ - shared_.ring.first_positions[stage];
    const int place = Place(stage);
    if (place == 1) last -= p_.grouped.window;
    const bool whole = mask == ~uint64_t{0};
    if (!whole || last < kPageTokens - 1) {
      Mask(mask, static_cast<int>(max(-kPageTokens, min(last, kPageTokens))), me_, s);
    }
    if constexpr (kPlacement == Placement::kGrouped) {
      const int64_t far = last - p_.grouped.window;
      if (place == 0 && far > -kPageTokens) {
        MaskUpTo(static_cast<int>(min(far, kPageTokens)), me_, s);
      }
    } else if (p_.window_tokens > 0) {
      const int64_t before = last - p_.window_tokens;
      if (before > -kPageTokens) {
        MaskUpTo(static_cast<int>(min(before, kPageTokens)), me_, s);
      }
    }
    if (whole) return;
    // Both warpgroups write the same zeros, and each waits for its own.
    ZeroMaskedValues(shared_.ring, stage, mask, me_.thread, kGroupThreads);
    Synchronize(me_);
  }

  const AttendLaunch& p_;
  Shared& shared_;
  const int64_t first_position_;
  const ThreadPlace me_;
  const Queries<kHeadDim, !kPrepares<kPlacement, kCoded>> queries_;
  const uint64_t first_keys_, first_values_;  // descriptors of the first stage
  RingPosition<Shared::kStages> at_;          // the next page
  PageState next_ = kEnd;                     // its state
  int stage_ = 0;                             // of the page whose weights are made
};

template <int kHeadDim>
__device__ void Store(const AttendLaunch& p, const QueryTile& tile, int64_t head,
                      const ThreadPlace& me, ThreadState<kHeadDim>& state) {
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int row = me.row + 8 * i;
    if (row >= tile.num_rows) continue;
    const int64_t index = (tile.first_row + row) * heads + head;
    const float factor = sum == 0 ? 0.0f : 1.0f / sum;
    uint32_t* out = reinterpret_cast<uint32_t*>(p.out + index * kHeadDim);
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; e += 2) {
      if (RowOf(e) != i) continue;
      const int column = me.column + ColumnOf(e);
      out[column / 2] = Pack(state.out[e] * factor, state.out[e + 1] * factor);
    }
    if (p.lse != nullptr && me.column == 0) {
      p.lse[index] = sum == 0 ? kMinusInfinity : state.offset[i] / kLog2E + logf(sum);
    }
  }
}
template <bool kMayRotate, int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void ComputeRow(const AttendLaunch& p,
                           PrefillMemory<kHeadDim, kPlacement, kCoded>& shared, const PageRun& run,
                           int64_t part) {
  const ThreadPlace me = MyPlace();
  const int64_t head_in_group = part * kConsumers + me.consumer;
  const bool exists = head_in_group < p.group;
  const int64_t head = run.row % p.kv.layout.num_kv_heads * p.group + head_in_group;
  LoadQueries<kMayRotate>(p, run, head, exists, me, shared);
  ThreadState<kHeadDim> state;
  Consumer<kHeadDim, kPlacement, kCoded>(p, shared, run, me).Run(state);
  if (exists) Store<kHeadDim>(p, run.tile, head, me, state);
}

// The row of a CTA, and which part of the row's query heads it serves.
struct RowPart {
  int64_t row, part;
};

// All CTAs of a KV head start one after another, so that the L2 cache holds its pages for all of
// them. The longest rows of a head, those of the last queries, start first. The launch is for
// `num_heads` KV heads from `first_head` on.
__device__ RowPart MyRow(const AttendLaunch& p, unsigned first_head, unsigned num_heads) {
  const unsigned kv_heads = static_cast<unsigned>(p.kv.layout.num_kv_heads);
  const unsigned tiles = static_cast<unsigned>(p.num_rows) / kv_heads;
  const unsigned parts = gridDim.x / (tiles * num_heads);
  const unsigned index = blockIdx.x / parts;
  return {.row = int64_t{tiles - 1 - index % tiles} * kv_heads + first_head + index / tiles,
          .part = blockIdx.x % parts};
}

// The shared memory of a kernel, whose barriers are ready.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ PrefillMemory<kHeadDim, kPlacement, kCoded>& InitMemory(std::byte* raw) {
  using Shared = PrefillMemory<kHeadDim, kPlacement, kCoded>;
  // An offset from `raw`, so that the compiler knows that all accesses are to shared memory.
  auto& shared = *reinterpret_cast<Shared*>(raw + (0u - hopper::SharedAddress(raw)) % 1024);
  if (threadIdx.x == 0) shared.Init();
  __syncthreads();
  return shared;
}

template <int kHeadDim, Placement kPlacement, bool kCoded>
__global__ void __launch_bounds__(PrefillRoles<kPlacement, kCoded>::kThreads, 1)
    AttendPrefillKernel(const __grid_constant__ AttendLaunch p,
                        const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  using Shared = PrefillMemory<kHeadDim, kPlacement, kCoded>;
  using Role = PrefillRoles<kPlacement, kCoded>;
  Shared& shared = InitMemory<kHeadDim, kPlacement, kCoded>(raw);
  const RowPart mine = MyRow(p, 0, static_cast<unsigned>(p.kv.layout.num_kv_heads));
  const PageRun run = WholeRow(p, mine.row);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == Role::kProducer) {
    hopper::FewerRegisters<Role::kProducerRegisters>();
    RingPosition<Shared::kStages> at;
    ProducePages<kPlacement>(p, maps, run, shared.ring, at, StoredPages<kPlacement>{p, maps, run});
  } else if (group > Role::kProducer) {
    if constexpr (Role::kHasPreparers) {
      hopper::FewerRegisters<Role::kPreparerRegisters>();
      PreparePages(p, shared);
    }
  } else {
    hopper::MoreRegisters<Role::kConsumerRegisters>();
    ComputeRow<kRotates<kPlacement>>(p, shared, run, mine.part);
  }
}

// The same over prepared pages, of which `maps` tell.
template <int kHeadDim>
__global__ void __launch_bounds__(PrefillRoles<Placement::kCached, false>::kThreads, 1)
    AttendPreparedKernel(const __grid_constant__ AttendLaunch p,
                         const __grid_constant__ PreparedPages pages,
                         const __grid_constant__ KvTensorMaps maps) {
  extern __shared__ std::byte raw[];
  using Shared = PrefillMemory<kHeadDim, Placement::kCached, false>;
  using Role = PrefillRoles<Placement::kCached, false>;
  Shared& shared = InitMemory<kHeadDim, Placement::kCached, false>(raw);
  const RowPart mine =
      MyRow(p, static_cast<unsigned>(pages.first_head), static_cast<unsigned>(pages.num_heads));
  const PageRun run = WholeRow(p, mine.row);
  if (static_cast<int>(threadIdx.x) / kGroupThreads == Role::kProducer) {
    hopper::FewerRegisters<Role::kProducerRegisters>();
    RingPosition<Shared::kStages> at;
    const CopiedPages resolve = {.pages = pages,
                                 .run = run,
                                 .header = p.headers[mine.row],
                                 .head = mine.row % p.kv.layout.num_kv_heads,
                                 .first_page = pages.FirstPage(run.tile.slot)};
    ProducePages<Placement::kCached>(p, maps, run, shared.ring, at, resolve);
  } else {
    hopper::MoreRegisters<Role::kConsumerRegisters>();
    ComputeRow<true>(p, shared, run, mine.part);
  }
}

// Launches a kernel with the shared memory of Shared.
template <typename Shared, typename... Params>
cudaError_t Launch(void (*kernel)(Params...), unsigned ctas, cudaStream_t stream,
                   const Params&... params) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  if (const cudaError_t error = AllowSharedBytes(kernel, kSharedBytes); error != cudaSuccess) {
    return error;
  }
  kernel<<<ctas, Shared::Roles::kThreads, kSharedBytes, stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchAttendPrefill(const AttendLaunch& params, const AttendKernelPlan& plan,
                                const KvTensorMaps& maps, cudaStream_t stream) {
  return ForShape(plan.shape, [&]<int kHeadDim, Placement kPlacement, bool kCoded>() {
    return Launch<PrefillMemory<kHeadDim, kPlacement, kCoded>>(
        AttendPrefillKernel<kHeadDim, kPlacement, kCoded>, plan.ctas * plan.ctas_of_row, stream,
        params, maps);
  });
}

cudaError_t LaunchAttendPrepared(const AttendLaunch& params, const AttendKernelPlan& plan,
                                 const PreparedPages& pages, const KvTensorMaps& maps,
                                 cudaStream_t stream) {
  return ForHeadDim(plan.shape.head_dim, [&]<int kHeadDim>() {
    return Launch<PrefillMemory<kHeadDim, Placement::kCached, false>>(
        AttendPreparedKernel<kHeadDim>, plan.ctas * plan.ctas_of_row, stream, params, pages, maps);
  });
}

}  // namespace kvasir::kernels
