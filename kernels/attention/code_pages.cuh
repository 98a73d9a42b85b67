// Pages of quantized KV (kernels/paged/kv_codes.h) in the ring of attention's kernels. The copy
// engine brings a page's codes to the half of a stage where values will lie; the stage's reader
// decodes them in place. Then the stage holds what it would hold with KV of bfloat16, bit for bit,
// and all that follows is the same. Where a ring keeps codes (decode attention without rotation),
// its reader takes them from there (code_products.cuh).
//
//   copied     -         | codes of K, codes of V
//   decoded    K, tile   | V, tile
//
// Used by page_pipeline.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/wgmma/wgmma.cuh"
#include "kernels/paged/kv_codes.cuh"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Scales of the pages in a ring, as copied: of K, then V, a byte a token.
template <int kStages>
struct CodeScales {
  alignas(16) std::byte bytes[kStages][2 * kPageTokens];
};
struct NoScales {};

template <int kHeadDim>
struct CodePage {
  static constexpr int kSideBytes = static_cast<int>(kPageTokens) * kHeadDim;
  static constexpr int kScaleBytes = 2 * static_cast<int>(kPageTokens);
  static constexpr int kPieceBytes = static_cast<int>(kPieceTokens) * kHeadDim;  // of one side
  static constexpr int kRowParts = kHeadDim / 16;
  static constexpr int kSideParts = kSideBytes / 16;
};

// Copies the pieces of the page at `from` that are named by bits, and all scales. Called by one
// thread, whose arrival announces the bytes.
template <typename Ring>
__device__ void CopyCodes(Ring& ring, int stage, const std::byte* from, unsigned pieces) {
  using Page = CodePage<Ring::Shape::kDim>;
  uint64_t* const full = &ring.full[stage];
  std::byte* const to = ring.codes(stage);
  const auto copied = static_cast<uint32_t>(__popc(pieces) * 2 * Page::kPieceBytes);
  hopper::BarrierArriveExpecting(full, copied + Page::kScaleBytes);
  hopper::CopyOnce(ring.scales.bytes[stage], from + 2 * Page::kSideBytes, Page::kScaleBytes, full);
  if (pieces == (1u << kPagePieces) - 1) {
    hopper::CopyOnce(to, from, 2 * Page::kSideBytes, full);
    return;
  }
  for (unsigned rest = pieces; rest != 0; rest &= rest - 1) {
    const int begin = (__ffs(static_cast<int>(rest)) - 1) * Page::kPieceBytes;
    hopper::CopyOnce(to + begin, from + begin, Page::kPieceBytes, full);
    hopper::CopyOnce(to + Page::kSideBytes + begin, from + Page::kSideBytes + begin,
                     Page::kPieceBytes, full);
  }
}

// Writes part `part` of row `row`, sixteen elements, to a tile. Threads of a head's second half
// write their second eight first: so eight neighbours use all banks.
template <int kHeadDim>
__device__ void StoreDecoded(std::byte* tile, int row, int part, const uint4 (&elements)[2]) {
  constexpr int kRows = static_cast<int>(kPageTokens);
  constexpr int kHalfParts = hopper::kSwizzledRowBytes / 32;
  const int first = part >= kHalfParts ? 1 : 0;
  const int half = part / kHalfParts;
  std::byte* const box = tile + half * kRows * hopper::kSwizzledRowBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = i ^ first;
    const int column = part % kHalfParts * 32 + place * 16;
    *reinterpret_cast<uint4*>(box + hopper::SwizzledOffset(row, column)) =
        place == 0 ? elements[0] : elements[1];
  }
}

// Whether a stage is decoded to its elements, or to these without their tokens' scales. Then all
// are finite, and the reader applies scales to logits and weights, which are fewer.
enum class Decoding { kElements, kUnscaled };

template <int kThreads, Decoding kDecoding, bool kIsInt8, typename Ring, typename Synchronize>
__device__ void DecodeStageAs(Ring& ring, int stage, int thread, const Synchronize& synchronize) {
  constexpr int kDim = Ring::Shape::kDim;
  using Page = CodePage<kDim>;
  static_assert(Page::kSideParts % kThreads == 0);
  constexpr int kParts = Page::kSideParts / kThreads;
  // Without this the places of all parts would be kept between pages, in more registers than there
  // are.
  asm volatile("" : "+r"(thread));
  uint4 held[kParts];
  const auto load = [&](int side) {
    const auto* const codes =
        reinterpret_cast<const uint4*>(ring.codes(stage) + side * Page::kSideBytes) + thread;
#pragma unroll
    for (int j = 0; j < kParts; ++j) held[j] = codes[j * kThreads];
  };
  // Two parts are not unrolled: with heads of 64 registers would be spilled.
  const auto store = [&](std::byte* tile, int side) {
#pragma unroll(kParts > 2 ? kParts : 1)
    for (int j = 0; j < kParts; ++j) {
      const int row = (thread + j * kThreads) / Page::kRowParts;
      uint4 elements[2] = {DecodeEight<kIsInt8>({held[j].x, held[j].y}),
                           DecodeEight<kIsInt8>({held[j].z, held[j].w})};
      if constexpr (kDecoding == Decoding::kElements) {
        const CodeScale scale(ring.ScaleOf(stage, side, row));
        for (uint4& eight : elements) eight = scale.Of(eight);
      }
      StoreDecoded<kDim>(tile, row, thread % Page::kRowParts, elements);
    }
  };
  load(0);
  store(ring.keys(stage), 0);
  load(1);
  synchronize();  // no code is read after this
  store(ring.values(stage), 1);
  hopper::FenceAsyncProxy();
}

// Decodes the stage's codes, by kThreads threads, of which this is number `thread`. `synchronize`
// waits for all of them. A barrier must follow.
template <int kThreads, Decoding kDecoding, typename Ring, typename Synchronize>
__device__ void DecodeStage(Ring& ring, int stage, DType dtype, int thread,
                            const Synchronize& synchronize) {
  if (dtype == DType::kInt8) {
    DecodeStageAs<kThreads, kDecoding, true>(ring, stage, thread, synchronize);
  } else {
    DecodeStageAs<kThreads, kDecoding, false>(ring, stage, thread, synchronize);
  }
}

}  // namespace kvasir::kernels
