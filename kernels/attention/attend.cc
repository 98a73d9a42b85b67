#include "kernels/attention/attend.h"

#include <iterator>

#include "absl/strings/str_cat.h"

#include "kernels/attention/attend_cpu.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/paged/query_tile_check.h"

namespace kvasir::kernels {

absl::Status CheckAttendParams(const AttendParams& p) {
  const KvLayout& layout = p.kv.layout;
  const int64_t rows = static_cast<int64_t>(p.tiles.size()) * layout.num_kv_heads;
  ShapeCheck check("attend");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Match("out", p.out, {"tokens", "heads", layout.head_dim}, p.q.dtype())
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(IsKvDType(layout.dtype), "the KV dtype must be float32, bfloat16, fp8_e4m3 or int8")
      .Require(p.layer >= 0 && p.layer < layout.num_layers, "no such layer")
      .Require(p.selection.num_rows == rows, "selection.num_rows must be blocks x KV heads")
      .Require(p.selection.headers != nullptr || rows == 0, "selection has no headers")
      .Require(static_cast<int64_t>(p.faults.size()) == p.kv.num_slots,
               "faults must be [num_slots]")
      .Require(p.scratch != nullptr, "scratch is missing; pass the calling thread's Scratch")
      .Require(p.rope == nullptr || p.rope->head_dim() == layout.head_dim,
               "rope must be of the KV's head_dim")
      .Require(!p.grouped.on() || (p.rope != nullptr && p.grouped.window > 0),
               "grouped positions need rope, and a window of at least 1")
      .Require(!p.grouped.on() || p.terminations.empty(),
               "rows at grouped positions cannot be terminated")
      .Require(p.window_tokens == 0 ||
                   (p.window_tokens > 0 && !p.grouped.on() && p.terminations.empty()),
               "window_tokens needs native or compact positions and no terminations")
      .Require(p.terminations.empty() || p.terminations.size() == p.tiles.size(),
               "terminations must be one per query tile")
      .Require(std::ssize(p.unread) == (p.terminations.empty() ? 0 : rows),
               "unread must be [blocks x KV heads] with terminations, else empty");
  if (!p.lse.empty()) check.Match("lse", p.lse, {"tokens", "heads"}, DType::kFloat32);
  KVASIR_RETURN_IF_ERROR(check.status());
  check.Require(layout.num_kv_heads > 0 && check.dim("heads") % layout.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  for (size_t b = 0; b < p.terminations.size(); ++b) {
    if (p.terminations[b].terminator == nullptr || p.tiles[b].num_rows == 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("attend: query tile ", b, " has ",
                                                   p.tiles[b].num_rows,
                                                   " queries; a terminator needs one"));
  }
  return CheckQueryTiles("attend", p.tiles, check.dim("tokens"), p.kv);
}

absl::string_view AttendPathName(int64_t head_dim) {
  const CpuIsa isa = ChosenCpuIsa();
  return CpuIsaName(HasFastAttend(isa, head_dim) ? isa : CpuIsa::kPortable);
}

absl::Status Attend(const AttendParams& p, Executor& executor) {
  KVASIR_RETURN_IF_ERROR(CheckAttendParams(p));
  if (p.grouped.on()) {
    p.rope->Reserve(EndOfPositions(p.tiles), executor);
  } else if (p.rope != nullptr) {
    ReservePositions(p.selection, p.tiles, p.kv.layout.num_kv_heads, *p.rope, executor);
  }
  const CpuIsa isa = ChosenCpuIsa();
  if (HasFastAttend(isa, p.kv.layout.head_dim)) return AttendFast(p, isa, executor);
  AttendReference(p, executor);
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
