// Brings pages to prefill attention (attend_prefill.cu): the memory that its warpgroups share, the
// warpgroup that sends pages through the ring, and those that decode pages and rotate keys.
//
//   producer                             preparers                    consumers
//   wait empty[stage]                    wait full[stage]             wait full[stage], or, where
//   copy K, V -> pages[stage],           decode, rotate keys          there are preparers,
//     full[stage]                        arrive at prepared[stage]      prepared[stage]
//                                                                     arrive at empty[stage]
#pragma once

#include "kernels/attention/page_pipeline.cuh"
#include "kernels/attention/prepared_pages.h"

namespace kvasir::kernels {

template <Placement kPlacement>
inline constexpr bool kRotates = kPlacement != Placement::kCached;
template <Placement kPlacement, bool kCoded>
inline constexpr bool kPrepares = kRotates<kPlacement> || kCoded;

// Warpgroups, and registers of a thread in each. The registers add up to those of the launch.
template <Placement kPlacement, bool kCoded>
struct PrefillRoles {
  static constexpr bool kHasPreparers = kPrepares<kPlacement, kCoded>;
  static constexpr int kProducer = kPrefillConsumers;
  static constexpr int kPreparers = kHasPreparers ? 2 : 0;  // the last warpgroups
  static constexpr int kThreads = (kPrefillConsumers + 1 + kPreparers) * kGroupThreads;
  static constexpr int kConsumerRegisters = !kHasPreparers ? 232 : kCoded ? 168 : 176;
  static constexpr int kProducerRegisters = kHasPreparers ? 32 : 40;
  static constexpr int kPreparerRegisters = kCoded ? 56 : 48;
};

// The facts about the page in a stage that consumers need, in one word.
enum PageState : int32_t {
  kEnd = 0,  // there is no page, nor any after it
  kWhole,    // all queries of the tile see all its tokens, at the first position
  kMasked,
};

template <int kHeadDim, int kStageCount, bool kHasCodes, Placement kPlacement>
struct PrefillRing : PageRing<kHeadDim, kStageCount, kHasCodes, KeyPositions<kPlacement>> {
  PageState states[kStageCount];
  uint64_t prepared[kStageCount];  // barriers: the stage is decoded and its keys are rotated
};

template <int kHeadDim, Placement kPlacement, bool kCoded>
struct alignas(1024) PrefillMemory {
  using Shape = PageShape<kHeadDim>;
  static constexpr int kPlaces = kPlacement == Placement::kGrouped ? 2 : 1;
  static constexpr int kQueryBytes = kPrefillConsumers * kPlaces * Shape::kSideBytes;
  static constexpr int kFactsBytes = kCoded ? 256 : 64;  // about those of a stage beside its page
  static constexpr int kStages = (226 * 1024 - kQueryBytes) / (Shape::kPageBytes + kFactsBytes);
  using Ring = PrefillRing<kHeadDim, kStages, kCoded, kPlacement>;
  using Roles = PrefillRoles<kPlacement, kCoded>;
  Ring ring;
  // With grouped positions: as near keys see them, then as far keys see them.
  alignas(1024) std::byte queries[kPrefillConsumers][kPlaces][Shape::kSideBytes];

  // Called by one thread, before a __syncthreads.
  __device__ void Init() {
    constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
    if constexpr (Roles::kHasPreparers) {
      for (uint64_t& barrier : ring.prepared) {
        hopper::BarrierInit(&barrier, Roles::kPreparers * kGroupWarps);
      }
    }
    ring.Init(kPrefillConsumers * kGroupWarps);
  }
  // Returns the barrier that consumers wait for.
  __device__ uint64_t* Ready(int stage) {
    return Roles::kHasPreparers ? &ring.prepared[stage] : &ring.full[stage];
  }
};

// The two sides of a page with grouped positions: the tokens that queries of the tile see from
// their far position, and those that they see from their own. A page where neighbourhoods begin has
// both sides, and a token may be far for some queries and near for others.
using GroupedPage = ResolvedPage<Placement::kGrouped>;
__device__ inline GroupedPage FarSide(const AttendLaunch& p, const PageRun& run, GroupedPage page) {
  page.mask &= p.grouped.FarMask(page.page, run.items.last_position);
  page.positions.near_begin = static_cast<int32_t>(kPageTokens);
  return page;
}
__device__ inline GroupedPage NearSide(const AttendLaunch& p, const PageRun& run,
                                       GroupedPage page) {
  page.mask &= ~p.grouped.FarMask(page.page, run.tile.first_position);
  page.positions.near_begin = 0;
  page.positions.first_near = static_cast<int32_t>(page.page * kPageTokens);
  return page;
}

// Prefetches the angles of a page's keys into the L2 cache. The angles of the tokens of its mask
// are contiguous.
__device__ inline void PrefetchAngles(const DeviceRopePositions& rope, int64_t half_dim,
                                      const ResolvedPage<Placement::kCompact>& page) {
  const int64_t first = page.positions.of(__ffsll(static_cast<long long>(page.mask)) - 1);
  const int64_t last = page.positions.of(63 - __clzll(static_cast<long long>(page.mask)));
  const auto bytes = static_cast<uint32_t>((last + 1 - first) * half_dim * sizeof(float));
  hopper::PrefetchRange(rope.cos + first * half_dim, bytes);
  hopper::PrefetchRange(rope.sin + first * half_dim, bytes);
}

// Finds item `index` of the run where it lies in the store, and records that it is read.
template <Placement kPlacement>
struct StoredPages {
  const AttendLaunch& p;
  const KvTensorMaps& maps;
  const PageRun& run;

  __device__ ResolvedPage<kPlacement> operator()(int64_t index) const {
    ResolvedPage<kPlacement> page = ResolveItem<kPlacement>(p, maps, run, index);
    if constexpr (kPlacement == Placement::kGrouped) {
      ClaimPage(
          p, run, page,
          CopiedTokens(FarSide(p, run, page).mask) + CopiedTokens(NearSide(p, run, page).mask));
    } else {
      ClaimPage(p, run, page, CopiedTokens(page.mask));
    }
    return page;
  }
};

// Finds it in prepared pages.
struct CopiedPages {
  const PreparedPages& pages;
  const PageRun& run;
  const SelectionHeader& header;
  int64_t head;
  int32_t first_page;  // of the run's sequence

  __device__ ResolvedPage<Placement::kCached> operator()(int64_t index) const {
    ResolvedPage<Placement::kCached> page;
    if (index >= run.end) return page;
    const RowItem item = FindItem(run.items, header, nullptr, index);
    page.mask = item.mask;
    page.page = static_cast<int32_t>(item.page);
    page.copy_row =
        static_cast<int32_t>(pages.Place(first_page + item.page, head) * 2 * kPageTokens);
    page.tier = PageTier::kDevice;
    return page;
  }
};

// Sends the run's pages through the ring, by the first warp of the producer: one stage for each
// item with tokens (with grouped positions one for each side with tokens), and at the end one stage
// without tokens. `resolve` finds an item. A page's products take about 1,000 cycles, and 500
// instructions of one thread take longer: little may be done for each page here.
template <Placement kPlacement, typename Ring, typename Resolve>
__device__ void ProducePages(const AttendLaunch& p, const KvTensorMaps& maps, const PageRun& run,
                             Ring& ring, RingPosition<Ring::kStages>& at, const Resolve& resolve) {
  if (threadIdx.x % kGroupThreads >= kWarpThreads) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto send = [&](const ResolvedPage<kPlacement>& page) {
    hopper::BarrierWait(&ring.empty[at.stage], at.parity ^ 1);
    if (lane == 0) {
      const int64_t last_token = page.page * kPageTokens + kPageTokens - 1;
      const bool is_whole = kPlacement != Placement::kGrouped && page.mask == ~uint64_t{0} &&
                            last_token <= run.tile.first_position &&
                            BeforeWindow(p.window_tokens, page.page, run.items.last_position) == 0;
      ring.states[at.stage] = page.mask == 0 ? kEnd : is_whole ? kWhole : kMasked;
      ring.masks[at.stage] = page.mask;
      ring.first_positions[at.stage] = page.page * kPageTokens;
      if constexpr (kPlacement != Placement::kCached) ring.key_positions[at.stage] = page.positions;
      if (page.mask == 0) {
        hopper::BarrierArrive(&ring.full[at.stage]);
      } else {
        CopyPage(ring, at.stage, maps, page);
        // With grouped positions there are few angles, and they stay in the cache.
        if constexpr (kPlacement == Placement::kCompact) {
          PrefetchAngles(p.rope, Ring::Shape::kDim / 2, page);
        }
      }
    }
    __syncwarp();  // shuffles of lanes that arrive one by one are slow
    at.Next();
  };
  // Each lane resolves one item of the next 32, while those before them are attended to.
  for (int64_t begin = run.begin; begin < run.end; begin += kWarpThreads) {
    const ResolvedPage<kPlacement> current = resolve(begin + lane);
    const int count = static_cast<int>(min(int64_t{kWarpThreads}, run.end - begin));
    for (int i = 0; i < count; ++i) {
      const ResolvedPage<kPlacement> page = ShareResolved<kPlacement>(current, i);
      if constexpr (kPlacement == Placement::kGrouped) {
        const GroupedPage far = FarSide(p, run, page);
        const GroupedPage near = NearSide(p, run, page);
        if (far.mask != 0) send(far);
        if (near.mask != 0) send(near);
      } else if (page.mask != 0) {
        send(page);
      }
    }
  }
  send({});
}

// Decodes all pages to the end, where the KV is quantized, and rotates their keys, where these are
// cached un-rotated. Called by the preparing warpgroups.
template <int kHeadDim, Placement kPlacement, bool kCoded>
__device__ void PreparePages(const AttendLaunch& p,
                             PrefillMemory<kHeadDim, kPlacement, kCoded>& shared) {
  using Memory = PrefillMemory<kHeadDim, kPlacement, kCoded>;
  using Roles = typename Memory::Roles;
  constexpr int kThreads = Roles::kPreparers * kGroupThreads;
  const int thread = static_cast<int>(threadIdx.x) - (Roles::kThreads - kThreads);
  const auto synchronize = [] { hopper::NamedBarrier(1 + kPrefillConsumers, kThreads); };
  RingPosition<Memory::kStages> at;
  for (bool is_end = false; !is_end; at.Next()) {
    hopper::BarrierWait(&shared.ring.full[at.stage], at.parity);
    is_end = shared.ring.masks[at.stage] == 0;
    if (!is_end) {
      if constexpr (kCoded) {
        DecodeStage<kThreads, Decoding::kElements>(shared.ring, at.stage, p.kv.layout.dtype, thread,
                                                   synchronize);
      }
      if constexpr (kRotates<kPlacement>) {
        if constexpr (kCoded) synchronize();
        RotateKeys(shared.ring, at.stage, p.rope, thread, kThreads);
      }
    }
    __syncwarp();
    if (thread % kWarpThreads == 0) hopper::BarrierArrive(&shared.ring.prepared[at.stage]);
  }
}

}  // namespace kvasir::kernels
