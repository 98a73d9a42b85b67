// Which kernel of attend_cuda.h serves a call, and its CTAs. Needs no GPU. Included by
// attend_cuda.cc, kernels/sparse/art and the kernels, which have a variant for each head_dim and
// placement.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

namespace kvasir::kernels {

// The positions of queries and keys.
enum class Placement {
  kCached,   // their own positions: keys are cached rotated
  kCompact,  // compact_positions.h
  kGrouped,  // grouped_positions.h
};

struct AttendShape {
  int64_t head_dim = 0;
  int64_t rows = 0;   // tiles x KV heads
  int64_t group = 0;  // query heads of a KV head
  Placement placement = Placement::kCached;
  bool has_codes = false;  // the KV is quantized
};

// Query heads that a CTA of prefill attends with.
inline constexpr int kPrefillConsumers = 2;
// Most query heads that a CTA of decode attends with.
inline constexpr int64_t kMaxDecodeHeads = 8;

struct AttendKernelPlan {
  enum class Kernel { kDecode, kPrefill, kPrepared };

  Kernel kernel = Kernel::kDecode;
  AttendShape shape;
  unsigned ctas = 0;         // of decode: each takes pieces of any rows; else: one per row,
  unsigned ctas_of_row = 1;  // times so many
  unsigned parts = 1;        // of decode: parts of a group, each of which has so many CTAs
};

// For tiles of one query: one CTA per multiprocessor.
inline AttendKernelPlan PlanAttendDecode(const AttendShape& shape, int num_processors) {
  const int64_t parts = std::max<int64_t>(1, (shape.group + kMaxDecodeHeads - 1) / kMaxDecodeHeads);
  return {.kernel = AttendKernelPlan::Kernel::kDecode,
          .shape = shape,
          .ctas = std::max(1u, static_cast<unsigned>(num_processors / parts)),
          .parts = static_cast<unsigned>(parts)};
}

// For tiles of up to 64 queries.
inline AttendKernelPlan PlanAttendPrefill(const AttendShape& shape) {
  return {.kernel = AttendKernelPlan::Kernel::kPrefill,
          .shape = shape,
          .ctas = static_cast<unsigned>(shape.rows),
          .ctas_of_row =
              static_cast<unsigned>((shape.group + kPrefillConsumers - 1) / kPrefillConsumers)};
}

// The same over prepared pages (prepared_pages.h) of `num_heads` KV heads.
inline AttendKernelPlan PlanAttendPrepared(const AttendShape& shape, int64_t num_kv_heads,
                                           int64_t num_heads) {
  AttendKernelPlan plan = PlanAttendPrefill(shape);
  plan.kernel = AttendKernelPlan::Kernel::kPrepared;
  plan.ctas = static_cast<unsigned>(shape.rows / num_kv_heads * num_heads);
  return plan;
}

inline std::ostream& operator<<(std::ostream& out, Placement placement) {
  switch (placement) {
    case Placement::kCached:
      return out << "cached";
    case Placement::kCompact:
      return out << "compact";
    case Placement::kGrouped:
      return out << "grouped";
  }
  return out << "unknown";
}

inline std::ostream& operator<<(std::ostream& out, const AttendKernelPlan& plan) {
  const AttendShape& shape = plan.shape;
  out << (plan.kernel == AttendKernelPlan::Kernel::kDecode ? "decode kernel" : "prefill kernel")
      << (plan.kernel == AttendKernelPlan::Kernel::kPrepared ? " over prepared pages" : "")
      << ", head_dim " << shape.head_dim << ", group " << shape.group << ", " << shape.placement
      << (shape.has_codes ? " positions, quantized KV, " : " positions, ");
  if (plan.kernel == AttendKernelPlan::Kernel::kDecode) {
    if (plan.parts > 1) out << plan.parts << " x ";
    return out << plan.ctas << " CTAs";
  }
  return out << plan.ctas << " x " << plan.ctas_of_row << " CTAs";
}

}  // namespace kvasir::kernels
