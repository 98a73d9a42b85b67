#include "kernels/append/append_cpu.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

template <typename From, typename To>
void ConvertRow(const From* from, int64_t n, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(from, n, to);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

// The rows of one tile and their page, of one head.
struct TilePlace {
  const QueryTile& tile;
  int64_t head;
  std::byte* page;

  int64_t block() const { return tile.first_position / kPageTokens; }
  int64_t offset() const { return tile.first_position % kPageTokens; }
  // Element of k and v where row r of the tile begins.
  int64_t Source(const KvLayout& layout, int64_t r) const {
    return ((tile.first_row + r) * layout.num_kv_heads + head) * layout.head_dim;
  }
};

// Writes the page's digests of the tile's keys, which are in the element dtype.
void DigestKeys(const AppendParams& p, const TilePlace& to, const std::byte* keys) {
  const KvLayout& layout = p.kv.layout;
  if (p.kv.key_codes != nullptr) {
    EncodeKeys(layout, keys, to.offset(), to.tile.num_rows,
               p.kv.KeyCodes(to.tile.slot, to.block(), p.layer, to.head));
  }
  if (p.kv.bounds == nullptr) return;
  std::byte* bounds = p.kv.Bounds(to.tile.slot, to.block(), p.layer, to.head);
  if (to.offset() == 0) ClearBounds(layout, bounds);
  ExtendBounds(layout, keys, to.tile.num_rows, bounds);
}

template <typename Activation, typename Kv>
void AppendRows(const AppendParams& p, const TilePlace& to) {
  const KvLayout& layout = p.kv.layout;
  const int64_t d = layout.head_dim;
  Kv* keys = reinterpret_cast<Kv*>(to.page) + to.offset() * d;
  Kv* values = reinterpret_cast<Kv*>(to.page + layout.v_offset()) + to.offset() * d;
  for (int64_t r = 0; r < to.tile.num_rows; ++r) {
    const int64_t source = to.Source(layout, r);
    ConvertRow(p.k.As<const Activation>() + source, d, keys + r * d);
    ConvertRow(p.v.As<const Activation>() + source, d, values + r * d);
  }
  DigestKeys(p, to, reinterpret_cast<const std::byte*>(keys));
}

template <typename Activation>
void AppendCodes(const AppendParams& p, const TilePlace& to) {
  const KvLayout& layout = p.kv.layout;
  std::byte* const scales = to.page + layout.scales_offset();
  for (int64_t r = 0; r < to.tile.num_rows; ++r) {
    const int64_t token = to.offset() + r;
    const int64_t source = to.Source(layout, r);
    QuantizeToken(layout.dtype, p.k.As<const Activation>() + source, layout.head_dim,
                  to.page + token * layout.row_bytes(), scales + token);
    QuantizeToken(layout.dtype, p.v.As<const Activation>() + source, layout.head_dim,
                  to.page + layout.v_offset() + token * layout.row_bytes(),
                  scales + kPageTokens + token);
  }
  std::vector<BFloat16> keys(static_cast<size_t>(kPageTokens * layout.head_dim));
  DequantizeSide(layout, PageSide::kKeys, to.page,
                 TokenMask(to.offset(), to.offset() + to.tile.num_rows), /*next_page=*/nullptr,
                 keys.data());
  DigestKeys(p, to,
             reinterpret_cast<const std::byte*>(keys.data() + to.offset() * layout.head_dim));
}

using AppendFn = void(const AppendParams& p, const TilePlace& to);

template <typename Activation>
AppendFn* FunctionFor(DType kv) {
  if (IsQuantized(kv)) return AppendCodes<Activation>;
  return kv == DType::kFloat32 ? AppendRows<Activation, float> : AppendRows<Activation, BFloat16>;
}

}  // namespace

void AppendKvCpu(const AppendParams& p, Executor& executor) {
  const DType kv = p.kv.layout.dtype;
  AppendFn* const append =
      p.k.dtype() == DType::kFloat32 ? FunctionFor<float>(kv) : FunctionFor<BFloat16>(kv);
  // One item a head: tiles of one head may share a page and its bounds, so they run in order.
  executor.ParallelFor(p.kv.layout.num_kv_heads, [&](int64_t head, int) {
    for (const QueryTile& tile : p.tiles) {
      const int64_t block = tile.first_position / kPageTokens;
      append(
          p,
          {.tile = tile, .head = head, .page = p.kv.Peek(tile.slot, block, p.layer, head).page()});
    }
  });
}

}  // namespace kvasir::kernels
