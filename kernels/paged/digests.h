// Page bounds (Quest's digest): element-wise minimum and maximum of the cached keys of a page, in
// the KV dtype: min[head_dim] then max[head_dim]. Derived data: whoever writes keys extends them,
// whoever cuts keys off rebuilds them. A NaN key is left out of the bounds; bounds over no key are
// min = +inf, max = -inf. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Positions [64 block, 64 block + num_tokens) of a slot have keys.
struct BlockKeys {
  int64_t slot = 0;
  int64_t block = 0;
  int64_t num_tokens = 0;  // 0 to 64
};

// Bounds over no key.
void ClearBounds(const KvLayout& layout, std::byte* bounds);

// Extends bounds by `num_rows` keys [num_rows, head_dim] in the KV dtype.
void ExtendBounds(const KvLayout& layout, const std::byte* keys, int64_t num_rows,
                  std::byte* bounds);

// Calls use(layer, head, page) for all pages of a block that is about to have a digest made anew
// from its first `num_tokens` keys. Errors as of RebuildBounds; `op` opens the message.
absl::Status ForEachPageOfBlock(
    absl::string_view op, const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens,
    const std::function<void(int64_t layer, int64_t head, const std::byte* page)>& use);

// Makes the bounds of all pages of a block anew from its first `num_tokens` keys: after a
// truncation, or where bounds are missing. INVALID_ARGUMENT for a slot, block or count that cannot
// be; FAILED_PRECONDITION, naming the page, when a page is absent.
absl::Status RebuildBounds(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens);

}  // namespace kvasir::kernels
