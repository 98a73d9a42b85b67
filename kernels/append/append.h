// Writes the keys and values of a batch into the open pages of one layer, extends the pages' bounds
// by the keys as cached, and codes the keys where key codes are kept (key_codes.h). Called by the
// attention layer before select and attend. Thread-compatible. Pages of different layers may be
// written concurrently.
//
//   page(slot, position / 64, layer, h).K[position % 64] = k[t, h]     (converted to the KV dtype)
//   page(slot, position / 64, layer, h).V[position % 64] = v[t, h]
//   bounds.min = min(bounds.min, cached k), bounds.max likewise, element by element
//
// Quantized KV (kv_codes.h): "as cached" is decoded again.
//
// A token at offset 0 of its page restarts the page's bounds. After a truncation inside a page the
// caller rebuilds the page's bounds (digests.h) before it appends again.
// Errors: INVALID_ARGUMENT on shapes. FAILED_PRECONDITION, naming the page, when a page is not in
// the device tier; nothing is written then.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

struct AppendParams {
  TensorView k;  // [tokens, num_kv_heads, head_dim], float32 or bfloat16
  TensorView v;  // [tokens, num_kv_heads, head_dim], dtype of k
  PagedKv kv;
  int64_t layer = 0;
  // Places of the tokens: row first_row + r goes to position first_position + r of the slot. Tiles
  // of one slot are in ascending position.
  std::span<const QueryTile> tiles;
};

absl::Status AppendKv(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
