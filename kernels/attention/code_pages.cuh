// Pages of quantized KV (kernels/paged/kv_codes.h) in the ring of attention's kernels. The copy
// engine brings a page's codes to the half of a stage where values will lie; the stage's reader
// decodes them in place. Then the stage holds what it would hold with KV of bfloat16, bit for bit,
// and all that follows is the same.
//
//   copied     -         | codes of K, codes of V
//   decoded    K, tile   | V, tile
//
// Used by page_pipeline.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/hopper.cuh"
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

// Decodes the stage's codes, by kThreads threads, of which this is number `thread`. `synchronize`
// waits for all of them. A barrier must follow.
template <int kThreads, typename Ring, typename Synchronize>
__device__ void DecodeStage(Ring& ring, int stage, DType dtype, int thread,
                            const Synchronize& synchronize) {
  constexpr int kDim = Ring::Shape::kDim;
  using Page = CodePage<kDim>;
  static_assert(Page::kSideParts % kThreads == 0);
  constexpr int kParts = Page::kSideParts / kThreads;
  const auto* const keys = reinterpret_cast<const uint4*>(ring.codes(stage));
  const auto* const values = reinterpret_cast<const uint4*>(ring.codes(stage) + Page::kSideBytes);
  const auto store = [&](std::byte* tile, int side, int i, const uint4& codes) {
    const int row = i / Page::kRowParts;
    uint4 elements[2];
    DecodeSixteen(dtype, codes, CodeScale(ring.ScaleOf(stage, side, row)), elements);
    StoreDecoded<kDim>(tile, row, i % Page::kRowParts, elements);
  };
#pragma unroll 1
  for (int i = thread; i < Page::kSideParts; i += kThreads) store(ring.keys(stage), 0, i, keys[i]);
  uint4 held[kParts];
#pragma unroll
  for (int j = 0; j < kParts; ++j) held[j] = values[thread + j * kThreads];
  synchronize();  // no code is read after this
#pragma unroll
  for (int j = 0; j < kParts; ++j) store(ring.values(stage), 1, thread + j * kThreads, held[j]);
  hopper::FenceAsyncProxy();
}

}  // namespace kvasir::kernels
