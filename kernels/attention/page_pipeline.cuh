// Brings pages to the attention kernels. One producer warp resolves them, several stages ahead of
// the warpgroups that compute, and has the copy engine write them into a ring in shared memory.
//
//   producer                                   consumers
//   wait empty[stage]                          wait full[stage]
//   masks[stage] = tokens to attend to         rotate keys, where they are cached un-rotated
//   copy K, V -> pages[stage], full[stage]     compute on pages[stage], decoded in place where the
//                                              KV is quantized and codes are not kept
//                                              (code_pages.cuh)
//                                              arrive at empty[stage], once a warp
//
// With grouped positions a query tile sees far keys from other positions than near keys, so pages
// that hold both go through the ring twice.
//
// Decode makes tiles of pages and of gathered tokens, with more warps (decode_tiles.cuh).
#pragma once

#include <type_traits>

#include "kernels/attention/attend_kernel.h"
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/code_pages.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/base/wgmma/wgmma.cuh"
#include "kernels/paged/row_items.h"

namespace kvasir::kernels {

inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kMinusInfinity = -INFINITY;

template <Placement kPlacement>
using KeyPositions =
    std::conditional_t<kPlacement == Placement::kGrouped, GroupedItemPositions, ItemPositions>;

// A page in shared memory: K half 0, K half 1, V half 0, V half 1 (one of each with a head_dim of
// 64), boxes of 64 tokens x 64 values, swizzled.
template <int kHeadDim>
struct PageShape {
  static constexpr int kDim = kHeadDim;
  static constexpr int kHalves = kHeadDim / static_cast<int>(kBoxColumns);
  static constexpr int kBoxBytes = static_cast<int>(kPageTokens) * hopper::kSwizzledRowBytes;
  static constexpr int kBoxes = 2 * kHalves;
  static constexpr int kSideBytes = kHalves * kBoxBytes;
  static constexpr int kPageBytes = 2 * kSideBytes;
};

// `kHasCodes`: the KV is quantized.
template <int kHeadDim, int kStageCount, bool kHasCodes, typename Positions = ItemPositions>
struct alignas(1024) PageRing {
  static constexpr int kStages = kStageCount;
  static constexpr bool kCoded = kHasCodes;
  static constexpr bool kKeepsCodes = false;  // readers decode them in place
  using Shape = PageShape<kHeadDim>;

  std::byte pages[kStages][Shape::kPageBytes];
  uint64_t masks[kStages];
  int64_t first_positions[kStages];  // of the page's first token
  Positions key_positions[kStages];  // where keys are rotated
  std::conditional_t<kCoded, CodeScales<kStages>, NoScales> scales;
  uint64_t full[kStages];
  uint64_t empty[kStages];

  __device__ std::byte* keys(int stage) { return pages[stage]; }
  __device__ std::byte* values(int stage) { return pages[stage] + Shape::kSideBytes; }
  // Codes of K, then V, until they are decoded.
  __device__ std::byte* codes(int stage) { return values(stage); }
  // Returns the scale of the key (side 0) or value (side 1) in row `row` of the stage.
  __device__ uint8_t ScaleOf(int stage, int side, int row) const {
    return static_cast<uint8_t>(scales.bytes[stage][side * kPageTokens + row]);
  }
  // Returns the position of the key in row `row` of the stage, if the key is attended to.
  __device__ int64_t PositionOf(int stage, int row) const { return key_positions[stage].of(row); }
  // Called by one thread, before a __syncthreads. `readers` is the number of warps that arrive at
  // `empty`, `writers` the number of arrivals at `full`.
  __device__ void Init(uint32_t readers, uint32_t writers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::BarrierInit(&full[stage], writers);
      hopper::BarrierInit(&empty[stage], readers);
    }
    hopper::FenceBarrierInit();
  }
};

// The place of a producer or consumer in the ring: the stage, and the parity of its use.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next(int stages = 1) {
    stage += stages;
    if (stage < kStages) return;
    stage -= kStages;
    parity ^= 1;
  }
};

// Items begin, begin + step, ... below `end` of a selection row.
struct PageRun {
  int64_t row = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t step = 1;
  QueryTile tile;
  RowItems items;
};

// The whole row.
__device__ inline PageRun WholeRow(const AttendLaunch& p, int64_t row) {
  PageRun run = {.row = row, .tile = p.tiles[row / p.kv.layout.num_kv_heads]};
  run.items = NumberItems(p.headers[row], run.tile.first_position + run.tile.num_rows - 1);
  run.end = run.items.num_items;
  return run;
}

// Returns the pieces of a page (kv_tensor_maps.h) that hold a token of the mask, as bits. Returns
// all pieces when so many do that reading the whole page is as fast.
__device__ inline unsigned PiecesOf(uint64_t mask) {
  constexpr int kMostPieces = 5;
  unsigned pieces = 0;
  for (int i = 0; i < kPagePieces; ++i) {
    if ((mask >> (i * kPieceTokens) & ((1u << kPieceTokens) - 1)) != 0) pieces |= 1u << i;
  }
  return __popc(pieces) > kMostPieces ? (1u << kPagePieces) - 1 : pieces;
}

// The part of a page that is copied.
template <Placement kPlacement>
struct PageSource {
  uint64_t mask = 0;                   // 0: nothing to read
  KeyPositions<kPlacement> positions;  // where keys are rotated; grouped: for the first query
  int32_t copy_row = 0;                // number of rows before it in its arena
  PageTier tier = PageTier::kAbsent;
};

template <Placement kPlacement>
struct ResolvedPage : PageSource<kPlacement> {
  int32_t page = 0;   // of the sequence
  int64_t index = 0;  // in the store's tables
};

template <Placement kPlacement>
__device__ ResolvedPage<kPlacement> ResolveItem(const AttendLaunch& p, const KvTensorMaps& maps,
                                                const PageRun& run, int64_t index) {
  ResolvedPage<kPlacement> resolved;
  if (index >= run.end) return resolved;
  const RowItem item =
      FindItem(run.items, p.headers[run.row], p.entries + run.row * p.capacity, index);
  if (item.mask == 0) return resolved;
  const KvLayout& layout = p.kv.layout;
  const int64_t head = run.row % layout.num_kv_heads;
  const int64_t extent = p.kv.extent(run.tile.slot, item.page);
  resolved.index = extent * layout.pages_per_block() + layout.page_in_block(p.layer, head);
  const PageRef page = extent < 0 ? PageRef() : p.kv.pages[resolved.index];
  resolved.mask = item.mask;
  resolved.page = static_cast<int32_t>(item.page);
  resolved.tier = page.tier();
  const std::byte* base = (resolved.tier == PageTier::kHost ? maps.host : maps.device).base;
  resolved.copy_row = static_cast<int32_t>((page.page() - base) / layout.row_bytes());
  if constexpr (kPlacement == Placement::kCompact) {
    resolved.positions =
        FindPositions(run.items, p.headers[run.row], p.entries + run.row * p.capacity, index);
  } else if constexpr (kPlacement == Placement::kGrouped) {
    resolved.positions = FindGroupedPositions(p.grouped, item.page, run.tile.first_position);
  }
  return resolved;
}

// Returns the number of tokens that CopyPage reads.
__device__ inline int64_t CopiedTokens(uint64_t mask) {
  return __popc(PiecesOf(mask)) * kPieceTokens;
}

// Records that `tokens` tokens of a page are read. `index` is that of the store's tables.
__device__ inline void RecordRead(const AttendLaunch& p, int64_t index, PageTier tier,
                                  int64_t tokens) {
  const AccessRecord& accesses = p.kv.accesses;
  if (accesses.last_touched == nullptr) return;
  accesses.last_touched[index] = *accesses.step;
  if (tier == PageTier::kHost) {
    atomicAdd(&accesses.missed_bytes[index], static_cast<uint32_t>(tokens * p.token_bytes));
  }
}

// Records that `tokens` tokens of the page are read. An absent page sets the slot's fault and gets
// an empty mask.
template <Placement kPlacement>
__device__ void ClaimPage(const AttendLaunch& p, const PageRun& run, ResolvedPage<kPlacement>& page,
                          int64_t tokens) {
  if (page.mask == 0) return;
  if (page.tier == PageTier::kAbsent) {
    p.faults[run.tile.slot] = 1;
    page.mask = 0;
    return;
  }
  RecordRead(p, page.index, page.tier, tokens);
}

// Returns lane `from`'s page, without its index.
template <Placement kPlacement>
__device__ ResolvedPage<kPlacement> ShareResolved(const ResolvedPage<kPlacement>& own, int from) {
  ResolvedPage<kPlacement> page;
  page.mask = __shfl_sync(kAllLanes, own.mask, from);
  page.page = __shfl_sync(kAllLanes, own.page, from);
  page.copy_row = __shfl_sync(kAllLanes, own.copy_row, from);
  page.tier = static_cast<PageTier>(__shfl_sync(kAllLanes, static_cast<int>(own.tier), from));
  if constexpr (kPlacement == Placement::kCompact) {
    page.positions.first = __shfl_sync(kAllLanes, own.positions.first, from);
    page.positions.counted = __shfl_sync(kAllLanes, own.positions.counted, from);
  } else if constexpr (kPlacement == Placement::kGrouped) {
    page.positions.first_far = __shfl_sync(kAllLanes, own.positions.first_far, from);
    page.positions.first_near = __shfl_sync(kAllLanes, own.positions.first_near, from);
    page.positions.near_begin = __shfl_sync(kAllLanes, own.positions.near_begin, from);
    page.positions.group_ends = __shfl_sync(kAllLanes, own.positions.group_ends, from);
  }
  return page;
}

// Called before the first copies: the maps lie in the kernel's parameters.
__device__ inline void PrefetchMaps(const KvTensorMaps& maps) {
  for (const KvTensorMaps::Arena* arena : {&maps.device, &maps.host}) {
    if (arena->base == nullptr) continue;
    hopper::PrefetchTensorMap(&arena->whole);
    hopper::PrefetchTensorMap(&arena->pages);
    hopper::PrefetchTensorMap(&arena->pieces);
  }
}

// Copies the pieces that hold tokens of the mask; the rest of the stage stays unchanged. One thread
// announces the bytes (ExpectPage). One or more threads copy boxes 0 to kBoxes - 1, before or after
// that.
template <typename Ring>
__device__ void ExpectPage(Ring& ring, int stage, uint64_t mask) {
  constexpr int kPieceBytes = Ring::Shape::kPageBytes / static_cast<int>(kPagePieces);
  hopper::BarrierArriveExpecting(&ring.full[stage],
                                 static_cast<uint32_t>(__popc(PiecesOf(mask)) * kPieceBytes));
}
template <typename Ring, Placement kPlacement>
__device__ void CopyBoxOfPage(Ring& ring, int stage, const KvTensorMaps& maps,
                              const PageSource<kPlacement>& page, int box) {
  using Shape = typename Ring::Shape;
  const KvTensorMaps::Arena& arena = page.tier == PageTier::kHost ? maps.host : maps.device;
  const unsigned pieces = PiecesOf(page.mask);
  // K first, then V.
  const int row = page.copy_row + box / Shape::kHalves * static_cast<int>(kPageTokens);
  const int column = box % Shape::kHalves * static_cast<int>(kBoxColumns);
  std::byte* const to = ring.pages[stage] + box * Shape::kBoxBytes;
  if (pieces == (1u << kPagePieces) - 1) {
    hopper::CopyBox(to, &arena.pages, column, row, &ring.full[stage]);
    return;
  }
  for (unsigned rest = pieces; rest != 0; rest &= rest - 1) {
    const int first = (__ffs(static_cast<int>(rest)) - 1) * static_cast<int>(kPieceTokens);
    hopper::CopyBox(to + first * hopper::kSwizzledRowBytes, &arena.pieces, column, row + first,
                    &ring.full[stage]);
  }
}
template <typename Ring, Placement kPlacement>
__device__ void CopyPage(Ring& ring, int stage, const KvTensorMaps& maps,
                         const PageSource<kPlacement>& page) {
  if constexpr (Ring::kCoded) {
    const std::byte* const base = page.tier == PageTier::kHost ? maps.host.base : maps.device.base;
    CopyCodes(ring, stage, base + int64_t{page.copy_row} * Ring::Shape::kDim, PiecesOf(page.mask));
  } else {
    if (page.mask == ~uint64_t{0}) {
      hopper::BarrierArriveExpecting(&ring.full[stage], Ring::Shape::kPageBytes);
      const KvTensorMaps::Arena& arena = page.tier == PageTier::kHost ? maps.host : maps.device;
      hopper::CopyRowsOf4(ring.pages[stage], &arena.whole, page.copy_row, &ring.full[stage]);
      return;
    }
    ExpectPage(ring, stage, page.mask);
    for (int box = 0; box < Ring::Shape::kBoxes; ++box) {
      CopyBoxOfPage(ring, stage, maps, page, box);
    }
  }
}

// A consumer thread's place: its warpgroup, and the elements that wgmma gives it of a product of 64
// rows.
struct ThreadPlace {
  int consumer;
  int thread;  // in the warpgroup
  int warp;    // in the warpgroup
  int row;     // the first of its two rows of a product; the other is 8 further on
  int column;  // the first of its columns
};

__device__ inline ThreadPlace MyPlace() {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int warp = thread / kWarpThreads;
  const int lane = thread % kWarpThreads;
  return {.consumer = static_cast<int>(threadIdx.x) / kGroupThreads,
          .thread = thread,
          .warp = warp,
          .row = warp * 16 + lane / 4,
          .column = lane % 4 * 2};
}

// Waits for the threads of one warpgroup.
__device__ inline void Synchronize(const ThreadPlace& me) {
  hopper::NamedBarrier(1 + me.consumer, kGroupThreads);
}

// Returns the sixteen bytes of row `row` from element `element` on, in a swizzled tile of kRows
// rows. The tile's halves lie kRows swizzled rows apart.
template <int kRows>
__device__ uint4* TilePart(std::byte* tile, int row, int element) {
  const int column = element * 2;  // bytes
  const int half = column / hopper::kSwizzledRowBytes;
  return reinterpret_cast<uint4*>(tile + half * kRows * hopper::kSwizzledRowBytes +
                                  hopper::SwizzledOffset(row, column % hopper::kSwizzledRowBytes));
}

// Loads queries in the layout of wgmma, by a warpgroup. Row r of the tile is query_of(r),
// [head_dim], or zero where that is null. The tile's halves lie kRows swizzled rows apart.
template <int kHeadDim, int kRows, typename QueryOf>
__device__ void LoadQueryTile(const ThreadPlace& me, const QueryOf& query_of, std::byte* to) {
  constexpr int kRowChunks = kHeadDim * 2 / 16;
  for (int chunk = me.thread; chunk < kRows * kRowChunks; chunk += kGroupThreads) {
    const int row = chunk / kRowChunks;
    const int column = chunk % kRowChunks * 16;  // bytes
    uint4 value = {};
    if (const __nv_bfloat16* query = query_of(row); query != nullptr) {
      value = *reinterpret_cast<const uint4*>(reinterpret_cast<const std::byte*>(query) + column);
    }
    *TilePart<kRows>(to, row, column / 2) = value;
  }
  hopper::FenceAsyncProxy();
  Synchronize(me);
}

// Same bits as the CPU's ApplyRope: x cos - y sin, x sin + y cos.
__device__ inline float2 Turn(float x, float y, float cos, float sin) {
  return {__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)),
          __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin))};
}

// Rotates two neighbouring pairs of elements that lie half a head apart.
__device__ inline void RotatePairs(uint32_t& low, uint32_t& high, float2 cos, float2 sin) {
  const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&low));
  const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&high));
  const float2 first = Turn(x.x, y.x, cos.x, sin.x);
  const float2 second = Turn(x.y, y.y, cos.y, sin.y);
  const __nv_bfloat162 turned_x = __floats2bfloat162_rn(first.x, second.x);
  const __nv_bfloat162 turned_y = __floats2bfloat162_rn(first.y, second.y);
  low = *reinterpret_cast<const uint32_t*>(&turned_x);
  high = *reinterpret_cast<const uint32_t*>(&turned_y);
}

// Rotates eight neighbouring pairs, by the angles from number `angle` on.
__device__ inline void RotateParts(const DeviceRopePositions& rope, int64_t angle, uint4& low,
                                   uint4& high) {
  const auto* cos = reinterpret_cast<const float4*>(rope.cos + angle);
  const auto* sin = reinterpret_cast<const float4*>(rope.sin + angle);
  const float4 c[2] = {__ldg(cos), __ldg(cos + 1)};
  const float4 s[2] = {__ldg(sin), __ldg(sin + 1)};
  RotatePairs(low.x, high.x, {c[0].x, c[0].y}, {s[0].x, s[0].y});
  RotatePairs(low.y, high.y, {c[0].z, c[0].w}, {s[0].z, s[0].w});
  RotatePairs(low.z, high.z, {c[1].x, c[1].y}, {s[1].x, s[1].y});
  RotatePairs(low.w, high.w, {c[1].z, c[1].w}, {s[1].z, s[1].w});
}

// Rotates rows of a swizzled tile in place, in float32: row r to position_of(r), unless that is
// negative. Called by `threads` threads, of which this is number `thread`. A barrier must follow.
template <int kHeadDim, int kRows, typename PositionOf>
__device__ void RotateTile(const DeviceRopePositions& rope, int thread, int threads,
                           const PositionOf& position_of, std::byte* tile) {
  constexpr int kElements = 8;  // in a part
  constexpr int kParts = kHeadDim / 2 / kElements;
#pragma unroll 2
  for (int i = thread; i < kRows * kParts; i += threads) {
    const int row = i / kParts;
    const int element = i % kParts * kElements;
    const int64_t position = position_of(row);
    if (position < 0) continue;
    uint4* const low = TilePart<kRows>(tile, row, element);
    uint4* const high = TilePart<kRows>(tile, row, element + kHeadDim / 2);
    uint4 x = *low;
    uint4 y = *high;
    RotateParts(rope, position * (kHeadDim / 2) + element, x, y);
    *low = x;
    *high = y;
  }
  hopper::FenceAsyncProxy();
}

// Rotates the stage's attended keys, each to its position. Called like RotateTile.
template <typename Ring>
__device__ void RotateKeys(Ring& ring, int stage, const DeviceRopePositions& rope, int thread,
                           int threads) {
  const uint64_t mask = ring.masks[stage];
  const auto position_of = [&](int row) {
    return (mask >> row & 1) != 0 ? ring.PositionOf(stage, row) : int64_t{-1};
  };
  RotateTile<Ring::Shape::kDim, static_cast<int>(kPageTokens)>(rope, thread, threads, position_of,
                                                               ring.keys(stage));
}

// Called by a reader when its whole warp is done with the stage.
template <typename Ring>
__device__ void ReleaseStage(Ring& ring, int stage) {
  __syncwarp();
  if (threadIdx.x % kWarpThreads == 0) hopper::BarrierArrive(&ring.empty[stage]);
}

// Zeroes the values of tokens that no query attends to: they may be anything, even NaN, and 0 times
// NaN is NaN. Called by `threads` threads, of which this is number `thread`. A barrier must follow.
template <typename Ring>
__device__ void ZeroMaskedValues(Ring& ring, int stage, uint64_t mask, int thread, int threads) {
  constexpr int kRowChunks = hopper::kSwizzledRowBytes / 16;
  auto* values = reinterpret_cast<uint4*>(ring.values(stage));
  for (int chunk = thread; chunk < Ring::Shape::kSideBytes / 16; chunk += threads) {
    const int token = chunk / kRowChunks % static_cast<int>(kPageTokens);
    if ((mask >> token & 1) == 0) values[chunk] = uint4{};
  }
  hopper::FenceAsyncProxy();
}

}  // namespace kvasir::kernels
