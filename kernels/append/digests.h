// Page bounds (Quest's digest): element-wise minimum and maximum of the cached keys of a page, in
// the element dtype (paged_kv.h): min[head_dim] then max[head_dim]. Derived data: the code that
// writes keys extends the bounds, and the code that cuts keys off rebuilds them. Bounds ignore NaN
// keys. Bounds over no key are min = +inf, max = -inf. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Positions [64 block, 64 block + num_tokens) of the slot have keys.
struct BlockKeys {
  int64_t slot = 0;
  int64_t block = 0;
  int64_t num_tokens = 0;  // 0 to 64
};

// Sets the bounds to those over no key.
void ClearBounds(const KvLayout& layout, std::byte* bounds);

// Extends the bounds by `num_rows` keys [num_rows, head_dim] in the element dtype.
void ExtendBounds(const KvLayout& layout, const std::byte* keys, int64_t num_rows,
                  std::byte* bounds);

// Calls use(layer, head, page) for all pages of a block whose digest is to be rebuilt from its
// first `num_tokens` keys. Returns the errors of RebuildBounds, with `op` first in the message.
absl::Status ForEachPageOfBlock(
    absl::string_view op, const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens,
    const std::function<void(int64_t layer, int64_t head, const std::byte* page)>& use);

// Rebuilds the bounds of all pages of a block from its first `num_tokens` keys, after a truncation
// or where bounds are missing. INVALID_ARGUMENT for an impossible slot, block or count.
// FAILED_PRECONDITION, naming the page, when a page is absent.
absl::Status RebuildBounds(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens);

}  // namespace kvasir::kernels
