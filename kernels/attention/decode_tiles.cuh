// Turns the pages of a unit of decode attention into tiles of 64 tokens. A page with more than half
// of its tokens attended to is a tile of its own, copied by the copy engine. The attended tokens of
// the other pages are put side by side into tiles that many pages share; threads gather them token
// by token. So the work follows the number of attended tokens, not of their pages.
//
//   items    page, 8 tokens, 1 token, page, 2 tokens, 50 tokens, ...
//   tiles    page | page | 50 tokens | 8 + 1 + 2 + ... | end | end | end
//
// A unit's last tile for a consumer says so. Where that was not known in time, or the consumer has
// no tile of the unit, an end follows, without tokens.
//
// For the senders of attend_decode.cu, warps of the producer warpgroup. Each goes through all tiles
// and copies its share of a page's boxes and of a gathered tile's rows.
#pragma once

#include "kernels/attention/decode_tasks.cuh"

namespace kvasir::kernels {

inline constexpr int kConsumers = 3;  // warpgroups that take the tiles of a unit in turn
inline constexpr int kTileTokens = static_cast<int>(kPageTokens);
// The other warp of the producers finds tasks (decode_tasks.cuh).
inline constexpr int kSenderWarps = kGroupThreads / kWarpThreads - 1;

enum class TileKind : int { kPage, kTokens, kNone };
// A tile may be the last of the consumer's tiles of the unit, or of all.
enum class TileEnds : int { kNothing, kConsumer, kUnit };

// Where the KV is quantized, a gathered token's scales come with their neighbours, as a word.
template <int kStages>
struct GatheredScales {
  uint32_t words[kStages][2][kTileTokens];    // of K, V
  uint8_t bytes[kStages][kTileTokens];        // place of the token's scale in its word
  uint8_t tokens[kSenderWarps][kTileTokens];  // of `sources`, in their pages
};

template <int kHeadDim, int kStageCount, bool kHasCodes, Placement kPlacement>
struct alignas(1024) TileRing
    : PageRing<kHeadDim, kStageCount, kHasCodes, KeyPositions<kPlacement>> {
  using Pages = PageRing<kHeadDim, kStageCount, kHasCodes, KeyPositions<kPlacement>>;
  // Decode attention takes codes as they are (code_products.cuh), unless keys must be rotated
  // first.
  static constexpr bool kKeepsCodes = kHasCodes && kPlacement == Placement::kCached;

  TileKind kinds[kStageCount];
  int places[kStageCount];  // the tile's number in its unit, mod kConsumers
  TileEnds ends[kStageCount];
  int32_t gathered_positions[kStageCount][kTileTokens];  // where keys are rotated
  int32_t sources[kSenderWarps][kTileTokens];            // copy rows of a gathered tile, ~row in
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
    // The senders' threads arrive at `full`, and one of them again when all is written.
    Pages::Init(kGroupThreads / kWarpThreads, kSenderWarps * kWarpThreads + 1);
  }
};

template <Placement kPlacement, typename Ring>
class TileSender {
  using Page = PageSource<kPlacement>;

 public:
  __device__ TileSender(const AttendLaunch& p, const KvTensorMaps& maps, Ring& ring)
      : p_(p),
        maps_(maps),
        ring_(ring),
        warp_(static_cast<int>(threadIdx.x) % kGroupThreads / kWarpThreads),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads) {}

  // Sends what the chunk has of unit `unit` of its task. Called by all threads of the senders.
  __device__ void Send(const Chunk<kPlacement>& chunk, int unit) {
    if (chunk.flags.begins) tile_ = 0;
    const Page& own = chunk.pages[lane_];
    const unsigned lanes = chunk.task.LanesOf(unit);
    const bool is_gathered = IsGathered(own);
    const bool is_tile = own.mask != 0 && !is_gathered;
    const unsigned tiles = chunk.flags.has_pages ? __ballot_sync(kAllLanes, is_tile) & lanes : 0;
    const bool gathers =
        chunk.flags.has_tokens && (__ballot_sync(kAllLanes, is_gathered) & lanes) != 0;
    const bool knows_last = chunk.flags.ends && !gathers && rows_ == 0;
    int ended = 0;  // consumers that know that the unit has ended
    for (unsigned rest = tiles; rest != 0; rest &= rest - 1) {
      const bool is_last = knows_last && __popc(rest) <= kConsumers;
      if (is_last) ++ended;
      SendPage(chunk.pages[__ffs(static_cast<int>(rest)) - 1], EndsAt(is_last, ended));
    }
    if (gathers) Gather(own, lanes);
    if (!chunk.flags.ends) return;
    if (rows_ > 0) Close(rows_);
    while (ended < kConsumers) SendEnd(EndsAt(true, ++ended));
  }

 private:
  using Shape = typename Ring::Shape;
  static constexpr bool kRotates = kPlacement != Placement::kCached;

  // `ended` consumers, the tile's among them if it is its last, know that the unit has ended.
  __device__ static TileEnds EndsAt(bool is_last, int ended) {
    if (!is_last) return TileEnds::kNothing;
    return ended == kConsumers ? TileEnds::kUnit : TileEnds::kConsumer;
  }

  // --- a tile: Begin, copies, End ---

  // Every warp waits and arrives at each use of a stage. Otherwise it could mistake one use for
  // another.
  __device__ void Begin() { hopper::BarrierWait(&ring_.empty[at_.stage], at_.parity ^ 1); }
  // Called by one thread, before its arrival.
  __device__ void Describe(TileKind kind, uint64_t mask, TileEnds ends) {
    ring_.kinds[at_.stage] = kind;
    ring_.masks[at_.stage] = mask;
    ring_.places[at_.stage] = tile_ % kConsumers;
    ring_.ends[at_.stage] = ends;
  }
  __device__ void End() {
    at_.Next();
    ++tile_;
  }

  __device__ void SendPage(const Page& page, TileEnds ends) {
    Begin();
    if (lane_ == 0) hopper::BarrierArrive(&ring_.full[at_.stage], kWarpThreads);
    const bool is_whole = Ring::kCoded || page.mask == ~uint64_t{0};
    if (warp_ == 0 && lane_ == 0) {
      Describe(TileKind::kPage, page.mask, ends);
      if constexpr (kRotates) ring_.key_positions[at_.stage] = page.positions;
      if (is_whole) {
        CopyPage(ring_, at_.stage, maps_, page);
      } else {
        ExpectPage(ring_, at_.stage, page.mask);
      }
    }
    for (int box = warp_; !is_whole && lane_ == 0 && box < Shape::kBoxes; box += kSenderWarps) {
      CopyBoxOfPage(ring_, at_.stage, maps_, page, box);
    }
    End();
  }

  __device__ void SendEnd(TileEnds ends) {
    Begin();
    if (lane_ == 0) hopper::BarrierArrive(&ring_.full[at_.stage], kWarpThreads);
    if (warp_ == 0 && lane_ == 0) {
      Describe(TileKind::kNone, 0, ends);
      hopper::BarrierArrive(&ring_.full[at_.stage]);
    }
    End();
  }

  // --- gathered tiles ---

  // Adds the tokens of the given lanes' gathered pages to the open tile, and to further tiles as
  // these fill up.
  __device__ void Gather(const Page& own, unsigned lanes) {
    uint64_t rest = IsGathered(own) && (lanes >> lane_ & 1) != 0 ? own.mask : 0;
    const int tokens = CountBits(rest);
    int end = tokens;  // of the rows of the lane and of the lanes before it
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_ >= distance) end += before;
    }
    int begin = rows_;
    int row = begin + end - tokens;
    int rows = begin + __shfl_sync(kAllLanes, end, kWarpThreads - 1);
    while (rows > begin) {
      if (begin == 0) Begin();
      for (; rest != 0 && row < kTileTokens; rest &= rest - 1, ++row) Name(own, rest, row);
      __syncwarp();
      CopyRows(begin, min(rows, kTileTokens));
      __syncwarp();  // before the next rows are named
      if (rows < kTileTokens) break;
      Close(kTileTokens);
      begin = 0;
      row -= kTileTokens;
      rows -= kTileTokens;
    }
    rows_ = rows;
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
         row += kSenderWarps * kRowsAtOnce) {
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
      Describe(TileKind::kTokens, TokenMask(0, rows), TileEnds::kNothing);
      hopper::BarrierArrive(&ring_.full[at_.stage]);
    }
    rows_ = 0;
    End();
  }

  const AttendLaunch& p_;
  const KvTensorMaps& maps_;
  Ring& ring_;
  const int warp_;
  const int lane_;
  RingPosition<Ring::kStages> at_;
  int tile_ = 0;  // in the unit
  int rows_ = 0;  // of the open gathered tile
};

}  // namespace kvasir::kernels
