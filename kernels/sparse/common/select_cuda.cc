#include "kernels/sparse/common/select_cuda.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

absl::Status Missing(absl::string_view name, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      name, ": the KV has no ", what, "; declare the policy before the KV store is made"));
}

}  // namespace

absl::StatusOr<SelectLaunch> MakeSelectLaunch(absl::string_view name, const CudaSelectParams& p,
                                              const PageSelection& out,
                                              const std::byte* workspace) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check(absl::StrCat(name, " on the GPU"));
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.q.device() == Device::kCuda, "q must be in device memory")
      .Require(IsKvDType(layout.dtype), "the KV must be float32, bfloat16, fp8_e4m3 or int8")
      .Require(layout.head_dim == 64 || layout.head_dim == 128, "head_dim must be 64 or 128")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.numbers.size() == p.tiles.size(), "numbers must be one per query tile")
      .Require(out.num_rows == static_cast<int64_t>(p.tiles.size()) * layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads")
      .Require(p.device_memories.empty() || p.device_memories.size() == p.tiles.size(),
               "memories must be one per query tile")
      .Require(workspace != nullptr || p.tiles.empty(), "the workspace is missing");
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Require(layout.num_kv_heads > 0 && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  return SelectLaunch{.q = p.q.data(),
                      .q_dtype = p.q.dtype(),
                      .group = p.q.dim(1) / layout.num_kv_heads,
                      .kv = p.kv,
                      .layer = p.layer,
                      .scale = p.scale,
                      .tiles = p.tiles.data(),
                      .numbers = p.numbers.data(),
                      .memories = p.device_memories.data(),
                      .out = out,
                      .rope = p.device_rope,
                      .is_whole_step = p.q.dim(0) == std::ssize(p.tiles)};
}

absl::Status RequirePlacedQueries(absl::string_view name, const CudaSelectParams& params) {
  if (!params.device_rope.on()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " on the GPU: queries must be rotated to their distance before"));
}

absl::Status RequireBounds(absl::string_view name, const PagedKv& kv) {
  return kv.bounds != nullptr ? absl::OkStatus() : Missing(name, "page bounds");
}

absl::Status RequireKeyCodes(absl::string_view name, const PagedKv& kv) {
  return kv.key_codes != nullptr ? absl::OkStatus() : Missing(name, "key codes");
}

}  // namespace kvasir::kernels
