// Tensor maps by which the GPU's copy engine addresses pages: three for each arena that holds
// pages, with rows of head_dim values. Pages of quantized KV are copied as plain bytes, without
// maps. A page is 64 rows of K and 64 rows of V, at any multiple of a row from the arena's start.
// It is copied whole, in boxes of 64 rows, or, where it is read in part, in pieces of 8 rows. Made
// once for each KV store; passed to kernels by value. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda.h>

#include "absl/status/statusor.h"

#include "kernels/base/tensor_map.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Rows of a piece: the swizzle's period, so that a piece has the same layout in shared memory as in
// a whole page.
inline constexpr int64_t kPieceTokens = 8;
inline constexpr int64_t kPagePieces = kPageTokens / kPieceTokens;

struct KvTensorMaps {
  struct Arena {
    CUtensorMap whole;   // K and V at once, in the order of boxes: columns fastest, then K and V
    CUtensorMap pages;   // boxes of kPageTokens rows
    CUtensorMap pieces;  // boxes of kPieceTokens rows
    const std::byte* base = nullptr;  // all that quantized KV has
  };
  Arena device;
  Arena host;
};

inline constexpr int64_t kArenaAlignment = 1024;

struct KvArena {
  std::byte* base = nullptr;  // aligned to kArenaAlignment, readable by the device
  int64_t bytes = 0;
};

// INVALID_ARGUMENT unless the layout is bfloat16, fp8_e4m3 or int8 with a head_dim of 64 or 128,
// and for an arena that is empty, misaligned, or of 2^31 rows or more. `host` may be empty: then no
// page may lie in the host tier.
absl::StatusOr<KvTensorMaps> MakeKvTensorMaps(const KvLayout& layout, const KvArena& device,
                                              const KvArena& host);

}  // namespace kvasir::kernels
