// Attention of a batch of query tiles over paged KV, dense or sparse: the only attention op.
//
//   out[t, h] = sum_j softmax_j(scale * q[t, h] . K[j, h / G]) V[j, h / G],
//   j over the tokens that the selection row (query tile of t, h / G) names, j <= position of t.
//
// With AttendParams::rope, q and K are un-rotated. Each is rotated to its compact position
// (compact_positions.h), or with AttendCall::grouped to its grouped one (grouped_positions.h).
// The rotation is in float32, and its result is rounded to the dtype of q, or of the KV, before the
// product.
//
// Guarantees:
// - float32 accumulation. With bfloat16 q and KV, products are those of bfloat16 pairs, and the
//   weights exp(l - max) are rounded to bfloat16 before the product with V (their sum and lse are
//   not).
// - A query's result depends only on its q, its position, its selection and the KV it names, never
//   on batch, chunk, tier or thread count. A query tile of one row gives the same bits as that row
//   inside a larger tile, and a list that covers everything the same bits as kind all. Pages are
//   read in the order of reading_order.h. Each of its segments is accumulated page by page, and
//   segments are merged in that order. Machines with different vector instructions may differ in
//   the last bits.
// - A row that no terminator ended early has the same bits as without a terminator, unless the
//   terminator reorders its pages. The place where a row ends depends on the row alone.
// - A query with no key gives out = 0 and lse = -inf. A NaN in a query, or in a key or value that
//   it attends to, makes that query's row NaN and no other. Rows that no tile names stay unchanged.
// - Quantized KV (paged/quantized_kv.h) gives the bits of bfloat16 KV with its decoded elements.
// Errors: INVALID_ARGUMENT on shapes. A selected page that is absent sets the slot's fault (see
// AttendCall::faults), and the out rows of its tile are unspecified.
// Cost: reads KvLayout::token_bytes() per attended token and KV head, once for all G
// query heads of the group. Any head_dim and group; head dims that are multiples of 64 are fast on
// machines with AVX2, AVX-512 or NEON. Scratch: per thread 12 * head_dim bytes per query row of the
// largest query tile, 772 * head_dim for tiles of a page, and 32 bytes per page of the longest row;
// 4 * head_dim per segment and query head of long decode rows; 256 * head_dim per thread for
// quantized KV. With rope, each page's keys are rotated once for all queries of a query tile and
// heads of a group. With grouped positions they are rotated twice where the page is near for some
// of the queries and far for others, and its near keys are then multiplied query by query.
// Source: online softmax (arXiv 1805.02867), R1 to R5 of docs/sparse_methods.md.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/attention/terminator.h"
#include "kernels/base/executor.h"
#include "kernels/base/scratch.h"
#include "kernels/base/tensor.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

// The part of an Attend call that is the same on every device.
struct AttendCall {
  TensorView q;    // [tokens, num_heads, head_dim], float32 or bfloat16
  TensorView out;  // [tokens, num_heads, head_dim], dtype of q
  TensorView lse;  // [tokens, num_heads], float32, natural log; empty: not written
  PagedKv kv;
  int64_t layer = 0;
  float scale = 0;                   // 1 / sqrt(head_dim) for the models served
  std::span<const QueryTile> tiles;  // tiles with disjoint rows
  PageSelection selection;        // rows = tiles x num_kv_heads; row = tile * num_kv_heads + head
  std::span<uint8_t> faults;      // [num_slots]; set to 1 when an absent page was selected
  GroupedPositions grouped = {};  // when on, needs un-rotated q and keys, and no terminations
  // Number of tokens that the layer lets query t see: j > position of t - window_tokens, where a
  // selection's window is that of the tile's first query. 0: no bound. Not with grouped positions
  // or terminations.
  int64_t window_tokens = 0;
};

// An Attend call on the CPU. CudaAttendParams (attend_cuda.h) is the GPU's.
struct AttendParams : AttendCall {
  Scratch* scratch = nullptr;  // working memory, required
  // Null when q and the cached keys are rotated. Otherwise neither is, and `rope` is extended to
  // the positions of the call.
  RopePositions* rope = nullptr;
  // One per tile: what may end its rows before their last page. Empty: nothing ends a row early. A
  // tile with a terminator has one query.
  std::span<const Termination> terminations = {};
  std::span<UnreadPages> unread = {};  // [rows of selection], written; empty without terminations
};

absl::Status Attend(const AttendParams& params, Executor& executor);

// Returns the instruction set that Attend uses on a CPU for this head_dim (base/cpu_isa.h), for
// logs.
absl::string_view AttendPathName(int64_t head_dim);

}  // namespace kvasir::kernels
