#include "kernels/append/digests.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/dtype.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

template <typename Kv>
void Extend(const Kv* keys, int64_t num_rows, int64_t d, Kv* min, Kv* max) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < d; ++i) {
      const Kv key = keys[r * d + i];
      // Comparisons with NaN are false: a NaN key changes nothing.
      min[i] = static_cast<float>(key) < static_cast<float>(min[i]) ? key : min[i];
      max[i] = static_cast<float>(key) > static_cast<float>(max[i]) ? key : max[i];
    }
  }
}

template <typename Kv>
void Clear(int64_t d, Kv* bounds) {
  std::fill_n(bounds, d, Kv{std::numeric_limits<float>::infinity()});
  std::fill_n(bounds + d, d, Kv{-std::numeric_limits<float>::infinity()});
}

}  // namespace

void ClearBounds(const KvLayout& layout, std::byte* bounds) {
  if (layout.dtype == DType::kFloat32) {
    Clear(layout.head_dim, reinterpret_cast<float*>(bounds));
  } else {
    Clear(layout.head_dim, reinterpret_cast<BFloat16*>(bounds));
  }
}

void ExtendBounds(const KvLayout& layout, const std::byte* keys, int64_t num_rows,
                  std::byte* bounds) {
  const int64_t d = layout.head_dim;
  if (layout.dtype == DType::kFloat32) {
    float* min = reinterpret_cast<float*>(bounds);
    Extend(reinterpret_cast<const float*>(keys), num_rows, d, min, min + d);
  } else {
    BFloat16* min = reinterpret_cast<BFloat16*>(bounds);
    Extend(reinterpret_cast<const BFloat16*>(keys), num_rows, d, min, min + d);
  }
}

absl::Status ForEachPageOfBlock(
    absl::string_view op, const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens,
    const std::function<void(int64_t layer, int64_t head, const std::byte* page)>& use) {
  if (slot < 0 || slot >= kv.num_slots || block < 0 || block >= kv.max_blocks_per_slot ||
      num_tokens < 0 || num_tokens > kPageTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": slot ", slot, " of ", kv.num_slots, ", block ", block, " of ",
                     kv.max_blocks_per_slot, ", ", num_tokens, " tokens of ", kPageTokens));
  }
  for (int64_t layer = 0; layer < kv.layout.num_layers; ++layer) {
    for (int64_t head = 0; head < kv.layout.num_kv_heads; ++head) {
      const PageRef ref = kv.Peek(slot, block, layer, head);
      if (ref.tier() == PageTier::kAbsent) {
        return absl::FailedPreconditionError(absl::StrCat(op, ": page (slot ", slot, ", block ",
                                                          block, ", layer ", layer, ", KV head ",
                                                          head, ") is absent; fetch it first"));
      }
      use(layer, head, ref.page());
    }
  }
  return absl::OkStatus();
}

absl::Status RebuildBounds(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens) {
  std::vector<std::byte> memory(static_cast<size_t>(DequantizedPageBytes(kv.layout) / 2));
  return ForEachPageOfBlock("rebuild_bounds", kv, slot, block, num_tokens,
                            [&](int64_t layer, int64_t head, const std::byte* page) {
                              std::byte* bounds = kv.Bounds(slot, block, layer, head);
                              const std::byte* keys =
                                  ReadKeys(kv.layout, page, TokenMask(0, num_tokens),
                                           /*next_page=*/nullptr, memory.data());
                              ClearBounds(kv.layout, bounds);
                              ExtendBounds(kv.layout, keys, num_tokens, bounds);
                            });
}

}  // namespace kvasir::kernels
