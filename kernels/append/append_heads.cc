#include "kernels/append/append_heads.h"

#include <cstring>

#include "kernels/append/append.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/rms_norm.h"

namespace kvasir::kernels {
namespace {

// Copies columns of `from`, from column `begin` on, to fill each row of `to`.
void CopyColumns(const TensorView& from, int64_t begin, const TensorView& to, Executor& executor) {
  const auto element = static_cast<int64_t>(DTypeSize(from.dtype()));
  const int64_t bytes = to.dim(1) * to.dim(2) * element;
  executor.ParallelFor(from.dim(0), [&](int64_t row, int) {
    std::memcpy(static_cast<std::byte*>(to.data()) + row * bytes,
                static_cast<const std::byte*>(from.data()) + (row * from.dim(1) + begin) * element,
                static_cast<size_t>(bytes));
  });
}

absl::Status Normalize(const TensorView& heads, const TensorView& weight, float epsilon,
                       Executor& executor) {
  if (weight.empty()) return absl::OkStatus();
  const TensorView rows(heads.data(), heads.dtype(), {heads.dim(0) * heads.dim(1), heads.dim(2)});
  return RmsNorm({.x = rows, .weight = weight, .y = rows, .epsilon = epsilon}, executor);
}

}  // namespace

absl::Status CheckLayerHeads(const AppendHeadsParams& p) {
  const LayerHeads& h = p.heads;
  const KvLayout& layout = p.kv.layout;
  const DType dtype = h.qkv.dtype();
  const int64_t d = layout.head_dim;
  ShapeCheck check("append_heads");
  check.Match("q", h.q, {"tokens", "heads", d}, dtype);
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Match("qkv", h.qkv, {"tokens", (h.q.dim(1) + 2 * layout.num_kv_heads) * d})
      .Require(IsFloat32OrBFloat16(dtype), "qkv must be float32 or bfloat16")
      .Require(IsKvDType(layout.dtype), "the KV dtype must be float32, bfloat16, fp8_e4m3 or int8")
      .Require(h.layer >= 0 && h.layer < layout.num_layers, "no such layer")
      .Require(h.q_norm.empty() == h.k_norm.empty(), "q and k are both normalized, or none is");
  if (!h.q_norm.empty()) {
    check.Match("q_norm", h.q_norm, {d}, dtype).Match("k_norm", h.k_norm, {d}, dtype);
  }
  return check.status();
}

absl::Status AppendHeads(const AppendHeadsParams& p, const RopeTable* rope, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckLayerHeads(p));
  const LayerHeads& h = p.heads;
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("append_heads");
  check.Match("qkv", h.qkv, {"tokens", "columns"})
      .Match("k", h.k, {"tokens", layout.num_kv_heads, layout.head_dim}, h.qkv.dtype())
      .Match("v", h.v, {"tokens", layout.num_kv_heads, layout.head_dim}, h.qkv.dtype());
  KVASIR_RETURN_IF_ERROR(check.status());
  const int64_t q_columns = h.q.dim(1) * layout.head_dim;
  const int64_t kv_columns = layout.num_kv_heads * layout.head_dim;
  CopyColumns(h.qkv, 0, h.q, executor);
  CopyColumns(h.qkv, q_columns, h.k, executor);
  CopyColumns(h.qkv, q_columns + kv_columns, h.v, executor);
  KVASIR_RETURN_IF_ERROR(Normalize(h.q, h.q_norm, h.epsilon, executor));
  KVASIR_RETURN_IF_ERROR(Normalize(h.k, h.k_norm, h.epsilon, executor));
  if (rope != nullptr) {
    KVASIR_RETURN_IF_ERROR(ApplyRope(*rope, h.q, executor));
    KVASIR_RETURN_IF_ERROR(ApplyRope(*rope, h.k, executor));
  }
  return AppendKv({.k = h.k, .v = h.v, .kv = p.kv, .layer = h.layer, .tiles = p.tiles}, executor);
}

}  // namespace kvasir::kernels
