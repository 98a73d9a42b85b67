// Turns the items of a unit of decode attention into tiles of 64 tokens. A page with more than half
// of its tokens attended to is a tile of its own, copied by the copy engine. The attended tokens of
// the other pages are put side by side into tiles that many pages share; threads gather them token
// by token. So the work follows the number of attended tokens, not of their pages.
//
//   items    page, 8 tokens, 1 token, page, 2 tokens, 50 tokens, ...
//   tiles    page | page | 50 tokens | 8 + 1 + 2 + ... | end | end | end
//
// For the producer warpgroup of attend_decode.cu. Its warps go through a unit in parallel: each
// resolves all items, and copies its share of a page's boxes and of a gathered tile's rows.
#pragma once

#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {

inline constexpr int kConsumers = 3;  // warpgroups that take the tiles of a unit in turn
inline constexpr int kTileTokens = static_cast<int>(kPageTokens);
// Pages with at most this many attended tokens are gathered.
inline constexpr int kMostGathered = kTileTokens / 2;
inline constexpr int kProducerWarps = kGroupThreads / kWarpThreads;

enum class TileKind : int { kPage, kTokens, kEnd };  // kEnd ends a unit for one consumer

// Where the KV is quantized, a gathered token's scales come with their neighbours, as a word.
template <int kStages>
struct GatheredScales {
  uint32_t words[kStages][2][kTileTokens];      // of K, V
  uint8_t bytes[kStages][kTileTokens];          // place of the token's scale in its word
  uint8_t tokens[kProducerWarps][kTileTokens];  // of `sources`, in their pages
};

template <int kHeadDim, int kStageCount, bool kHasCodes, typename Positions>
struct alignas(1024) TileRing : PageRing<kHeadDim, kStageCount, kHasCodes, Positions> {
  using Pages = PageRing<kHeadDim, kStageCount, kHasCodes, Positions>;

  TileKind kinds[kStageCount];
  int places[kStageCount];  // the tile's number in its unit, mod kConsumers
  int32_t gathered_positions[kStageCount][kTileTokens];  // where keys are rotated
  int32_t sources[kProducerWarps][kTileTokens];          // copy rows of a gathered tile, ~row in
                                                         // the host tier
  std::conditional_t<kHasCodes, GatheredScales<kStageCount>, NoScales> gathered_scales;

  __device__ int64_t PositionOf(int stage, int row) const {
    return kinds[stage] == TileKind::kTokens ? gathered_positions[stage][row]
                                             : Pages::PositionOf(stage, row);
  }
  __device__ uint8_t ScaleOf(int stage, int side, int row) const {
    if (kinds[stage] != TileKind::kTokens) return Pages::ScaleOf(stage, side, row);
    const uint32_t word = gathered_scales.words[stage][side][row];
    return static_cast<uint8_t>(word >> (8 * gathered_scales.bytes[stage][row]));
  }
  __device__ void Init() {
    // The producers' threads arrive at `full`, and one of them again when all is written.
    Pages::Init(kGroupThreads / kWarpThreads, kGroupThreads + 1);
  }
};

template <Placement kPlacement, typename Ring>
class TileProducer {
  using Page = ResolvedPage<kPlacement>;

 public:
  __device__ TileProducer(const AttendLaunch& p, const KvTensorMaps& maps, Ring& ring)
      : p_(p),
        maps_(maps),
        ring_(ring),
        warp_(static_cast<int>(threadIdx.x) % kGroupThreads / kWarpThreads),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads) {}

  // Sends the unit's tiles and ends through the ring. Called by all threads.
  __device__ void Produce(const PageRun& run) {
    tile_ = 0;
    const int64_t stride = kWarpThreads * run.step;  // of the items of the lanes
    bool gathers = false;
    Page own;
    Page next = Resolve(run, run.begin);
    for (int64_t first = run.begin; first < run.end; first += stride) {
      own = next;
      next = Resolve(run, first + stride);
      SendPages(own);
      if (warp_ == 0) Claim(run, own);
      gathers = __any_sync(kAllLanes, IsGathered(own)) || gathers;
    }
    if (gathers) GatherTokens(run, own, stride);
    for (int i = 0; i < kConsumers; ++i) SendEnd();
  }

 private:
  using Shape = typename Ring::Shape;
  static constexpr bool kRotates = kPlacement != Placement::kCached;

  __device__ static bool IsGathered(const Page& page) {
    return page.mask != 0 && CountBits(page.mask) <= kMostGathered;
  }

  // Resolves the lane's item among those from `first` on. An absent page has no tokens.
  __device__ Page Resolve(const PageRun& run, int64_t first) const {
    return ResolveItem<kPlacement>(p_, maps_, run, first + lane_ * run.step);
  }
  __device__ void Claim(const PageRun& run, Page page) const {
    ClaimPage(p_, run, page, IsGathered(page) ? CountBits(page.mask) : CopiedTokens(page.mask));
  }

  // --- a tile: Begin, copies, End ---

  // Every warp waits and arrives at each use of a stage. Otherwise it could mistake one use for
  // another.
  __device__ void Begin() { hopper::BarrierWait(&ring_.empty[at_.stage], at_.parity ^ 1); }
  // Called by one thread, before its arrival.
  __device__ void Describe(TileKind kind, uint64_t mask) {
    ring_.kinds[at_.stage] = kind;
    ring_.masks[at_.stage] = mask;
    ring_.places[at_.stage] = tile_ % kConsumers;
  }
  __device__ void End() {
    at_.Next();
    ++tile_;
  }

  __device__ void SendPages(const Page& own) {
    const bool is_tile = own.mask != 0 && own.tier != PageTier::kAbsent && !IsGathered(own);
    for (unsigned rest = __ballot_sync(kAllLanes, is_tile); rest != 0; rest &= rest - 1) {
      const Page page = ShareResolved<kPlacement>(own, __ffs(static_cast<int>(rest)) - 1);
      Begin();
      if (lane_ == 0) hopper::BarrierArrive(&ring_.full[at_.stage], kWarpThreads);
      if (warp_ == 0 && lane_ == 0) {
        Describe(TileKind::kPage, page.mask);
        if constexpr (kRotates) ring_.key_positions[at_.stage] = page.positions;
        if constexpr (Ring::kCoded) {
          CopyPage(ring_, at_.stage, maps_, page);
        } else {
          ExpectPage(ring_, at_.stage, page.mask);
        }
      }
      for (int box = warp_; !Ring::kCoded && lane_ == 0 && box < Shape::kBoxes;
           box += kProducerWarps) {
        CopyBoxOfPage(ring_, at_.stage, maps_, page, box);
      }
      End();
    }
  }

  __device__ void SendEnd() {
    Begin();
    if (lane_ == 0) hopper::BarrierArrive(&ring_.full[at_.stage], kWarpThreads);
    if (warp_ == 0 && lane_ == 0) {
      Describe(TileKind::kEnd, 0);
      hopper::BarrierArrive(&ring_.full[at_.stage]);
    }
    End();
  }

  // --- gathered tiles ---

  // `last` holds the lanes' last items of the run: all items, when the run has no more.
  __device__ void GatherTokens(const PageRun& run, const Page& last, int64_t stride) {
    int rows = 0;  // rows of the open tile
    for (int64_t first = run.begin; first < run.end; first += stride) {
      const bool is_last = first + stride >= run.end;
      rows = Gather(is_last ? last : Resolve(run, first), rows);
    }
    if (rows > 0) Close(rows);
  }

  // Adds the tokens of the lanes' gathered pages to the open tile, which has `begin` rows, and to
  // further tiles as these fill up. Returns the number of rows of the tile that is then open.
  __device__ int Gather(const Page& own, int begin) {
    const bool takes_part = own.tier != PageTier::kAbsent && IsGathered(own);
    uint64_t rest = takes_part ? own.mask : 0;
    const int tokens = CountBits(rest);
    int end = tokens;  // of the rows of the lane and of the lanes before it
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_ >= distance) end += before;
    }
    int row = begin + end - tokens;
    int rows = begin + __shfl_sync(kAllLanes, end, kWarpThreads - 1);
    while (rows > begin) {
      if (begin == 0) Begin();
      for (; rest != 0 && row < kTileTokens; rest &= rest - 1, ++row) Name(own, rest, row);
      __syncwarp();
      CopyRows(begin, min(rows, kTileTokens));
      __syncwarp();  // before the next rows are named
      if (rows < kTileTokens) return rows;
      Close(kTileTokens);
      begin = 0;
      row -= kTileTokens;
      rows -= kTileTokens;
    }
    return begin;
  }

  // Makes the first token of `rest` row `row` of the tile.
  __device__ void Name(const Page& own, uint64_t rest, int row) {
    const int token = __ffsll(static_cast<long long>(rest)) - 1;
    const int32_t copy_row = own.copy_row + token;
    ring_.sources[warp_][row] = own.tier == PageTier::kHost ? ~copy_row : copy_row;
    if constexpr (Ring::kCoded) {
      ring_.gathered_scales.tokens[warp_][row] = static_cast<uint8_t>(token);
      if (warp_ == 0) ring_.gathered_scales.bytes[at_.stage][row] = token % 4;
    }
    if constexpr (kRotates) {
      if (warp_ == 0) {
        ring_.gathered_positions[at_.stage][row] = static_cast<int32_t>(own.positions.of(token));
      }
    }
  }

  // Begins to copy the warp's share of rows [begin, end).
  __device__ void CopyRows(int begin, int end) {
    constexpr int kRowParts = Shape::kDim * (Ring::kCoded ? 1 : 2) / 16;
    constexpr int kRowsAtOnce = kWarpThreads / kRowParts;
    const int64_t row_bytes = p_.kv.layout.row_bytes();
    const int part = lane_ % kRowParts;
    for (int row = begin + warp_ * kRowsAtOnce + lane_ / kRowParts; row < end;
         row += kProducerWarps * kRowsAtOnce) {
      const int32_t source = ring_.sources[warp_][row];
      const std::byte* base = source < 0 ? maps_.host.base : maps_.device.base;
      const std::byte* key = base + int64_t{source < 0 ? ~source : source} * row_bytes + part * 16;
      if constexpr (Ring::kCoded) {
        CopyCodedRow(row, part, key);
        continue;
      }
      hopper::CopyPart(TilePart<kTileTokens>(ring_.keys(at_.stage), row, part * 8), key);
      hopper::CopyPart(TilePart<kTileTokens>(ring_.values(at_.stage), row, part * 8),
                       key + kPageTokens * row_bytes);
    }
  }

  // Begins to copy a part of a key and its value, where the KV is quantized. The first lanes of the
  // row also copy a scale each.
  __device__ void CopyCodedRow(int row, int part, const std::byte* key) {
    using Page = CodePage<Shape::kDim>;
    std::byte* const to = ring_.codes(at_.stage) + row * Shape::kDim + part * 16;
    hopper::CopyPart(to, key);
    hopper::CopyPart(to + Page::kSideBytes, key + Page::kSideBytes);
    if (part >= 2) return;
    const int token = ring_.gathered_scales.tokens[warp_][row];
    const std::byte* const page = key - part * 16 - token * Shape::kDim;
    hopper::CopyWord(&ring_.gathered_scales.words[at_.stage][part][row],
                     page + 2 * Page::kSideBytes + part * kPageTokens + token / 4 * 4);
  }

  __device__ void Close(int rows) {
    hopper::BarrierArriveOnCopies(&ring_.full[at_.stage]);
    if (warp_ == 0 && lane_ == 0) {
      Describe(TileKind::kTokens, TokenMask(0, rows));
      hopper::BarrierArrive(&ring_.full[at_.stage]);
    }
    End();
  }

  const AttendLaunch& p_;
  const KvTensorMaps& maps_;
  Ring& ring_;
  const int warp_;
  const int lane_;
  RingPosition<Ring::kStages> at_;
  int tile_ = 0;  // in the unit
};

}  // namespace kvasir::kernels
