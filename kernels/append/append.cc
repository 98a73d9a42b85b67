#include "kernels/append/append.h"

#include "absl/strings/str_cat.h"

#include "kernels/append/append_cpu.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/query_tile_check.h"

namespace kvasir::kernels {
namespace {

absl::Status CheckWritable(const AppendParams& p, const QueryTile& tile) {
  const int64_t index = tile.first_position / kPageTokens;
  for (int64_t head = 0; head < p.kv.layout.num_kv_heads; ++head) {
    const PageTier tier = p.kv.Peek(tile.slot, index, p.layer, head).tier();
    if (tier == PageTier::kDevice) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "append_kv: page (slot ", tile.slot, ", block ", index, ", layer ", p.layer, ", KV head ",
        head, ") is ", tier == PageTier::kHost ? "in the host tier" : "absent",
        "; only open blocks in the device tier take new tokens"));
  }
  return absl::OkStatus();
}

absl::Status CheckShapes(const AppendParams& p) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("append_kv");
  check.Match("k", p.k, {"tokens", layout.num_kv_heads, layout.head_dim})
      .Match("v", p.v, {"tokens", layout.num_kv_heads, layout.head_dim}, p.k.dtype())
      .Require(IsFloat32OrBFloat16(p.k.dtype()), "k must be float32 or bfloat16")
      .Require(IsKvDType(layout.dtype), "the KV dtype must be float32, bfloat16, fp8_e4m3 or int8")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer");
  return check.status();
}

}  // namespace

absl::Status AppendKv(const AppendParams& p, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckShapes(p));
  KVASIR_RETURN_IF_ERROR(CheckQueryTiles("append_kv", p.tiles, p.k.dim(0), p.kv));
  for (const QueryTile& tile : p.tiles) KVASIR_RETURN_IF_ERROR(CheckWritable(p, tile));
  AppendKvCpu(p, executor);
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
