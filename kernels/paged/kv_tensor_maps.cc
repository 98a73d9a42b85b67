#include "kernels/paged/kv_tensor_maps.h"

#include <limits>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

// Boxes of `box_rows` rows.
TensorMapShape RowsShape(const KvLayout& layout, const KvArena& arena, int64_t box_rows) {
  const auto row_bytes = static_cast<cuuint64_t>(layout.row_bytes());
  return {.rank = 2,
          .sizes = {static_cast<cuuint64_t>(layout.head_dim),
                    static_cast<cuuint64_t>(arena.bytes) / row_bytes},
          .strides = {row_bytes},
          .box = {kBoxColumns, static_cast<cuuint32_t>(box_rows)}};
}

// A page: its row is the first of K. The rows of V, kPageTokens further on, are another dimension,
// so a page's row lies below the arena's rows less those of V.
TensorMapShape WholeShape(const KvLayout& layout, const KvArena& arena) {
  const auto row_bytes = static_cast<cuuint64_t>(layout.row_bytes());
  const auto halves = static_cast<cuuint64_t>(layout.head_dim / kBoxColumns);
  return {.rank = 4,
          .sizes = {kBoxColumns, static_cast<cuuint64_t>(arena.bytes) / row_bytes - kPageTokens,
                    halves, 2},
          .strides = {row_bytes, row_bytes / halves, kPageTokens * row_bytes},
          .box = {kBoxColumns, kPageTokens, static_cast<cuuint32_t>(halves), 2}};
}

absl::StatusOr<KvTensorMaps::Arena> MakeMaps(const KvLayout& layout, const KvArena& arena) {
  if (arena.base == nullptr || reinterpret_cast<uintptr_t>(arena.base) % kArenaAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("an arena of pages must be aligned to ", kArenaAlignment, " bytes"));
  }
  if (arena.bytes < layout.page_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an arena of ", arena.bytes, " bytes holds no page, which takes ", layout.page_bytes()));
  }
  // Kernels count rows in 32 bits.
  if (arena.bytes / layout.row_bytes() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an arena of ", arena.bytes, " bytes has 2^31 rows of ", layout.row_bytes(), " or more"));
  }
  KvTensorMaps::Arena maps = {};
  maps.base = arena.base;
  if (IsQuantized(layout.dtype)) return maps;
  KVASIR_ASSIGN_OR_RETURN(maps.whole, MakeTensorMap(arena.base, WholeShape(layout, arena)));
  KVASIR_ASSIGN_OR_RETURN(maps.pages,
                          MakeTensorMap(arena.base, RowsShape(layout, arena, kPageTokens)));
  KVASIR_ASSIGN_OR_RETURN(maps.pieces,
                          MakeTensorMap(arena.base, RowsShape(layout, arena, kPieceTokens)));
  return maps;
}

}  // namespace

absl::StatusOr<KvTensorMaps> MakeKvTensorMaps(const KvLayout& layout, const KvArena& device,
                                              const KvArena& host) {
  if (layout.element_dtype() != DType::kBFloat16 ||
      (layout.head_dim != 64 && layout.head_dim != 128)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the GPU serves bfloat16, fp8_e4m3 and int8 KV with a head_dim of 64 or 128, not ",
        DTypeName(layout.dtype), " with ", layout.head_dim));
  }
  KvTensorMaps maps = {};
  KVASIR_ASSIGN_OR_RETURN(maps.device, MakeMaps(layout, device));
  if (host.base == nullptr) return maps;
  KVASIR_ASSIGN_OR_RETURN(maps.host, MakeMaps(layout, host));
  return maps;
}

}  // namespace kvasir::kernels
