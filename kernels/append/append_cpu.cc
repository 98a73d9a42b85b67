#include "kernels/append/append_cpu.h"

#include <algorithm>
#include <type_traits>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/base/dtype.h"

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

// Writes the rows of one tile into the page of one head.
template <typename Activation, typename Kv>
void AppendToPage(const AppendParams& p, const QueryTile& tile, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t d = layout.head_dim;
  const int64_t index = tile.first_position / kPageTokens;
  const int64_t offset = tile.first_position % kPageTokens;
  std::byte* page = p.kv.Peek(tile.slot, index, p.layer, head).page();
  Kv* keys = reinterpret_cast<Kv*>(page) + offset * d;
  Kv* values = reinterpret_cast<Kv*>(page + layout.v_offset()) + offset * d;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t source = ((tile.first_row + r) * layout.num_kv_heads + head) * d;
    ConvertRow(p.k.As<const Activation>() + source, d, keys + r * d);
    ConvertRow(p.v.As<const Activation>() + source, d, values + r * d);
  }
  const std::byte* cached = reinterpret_cast<const std::byte*>(keys);
  if (p.kv.key_codes != nullptr) {
    EncodeKeys(layout, cached, offset, tile.num_rows,
               p.kv.KeyCodes(tile.slot, index, p.layer, head));
  }
  if (p.kv.bounds == nullptr) return;
  std::byte* bounds = p.kv.Bounds(tile.slot, index, p.layer, head);
  if (offset == 0) ClearBounds(layout, bounds);
  ExtendBounds(layout, cached, tile.num_rows, bounds);
}

// One item a head: tiles of one head may share a page and its bounds, so they run in order.
template <typename Activation, typename Kv>
void Append(const AppendParams& p, Executor& executor) {
  executor.ParallelFor(p.kv.layout.num_kv_heads, [&](int64_t head, int) {
    for (const QueryTile& tile : p.tiles) AppendToPage<Activation, Kv>(p, tile, head);
  });
}

}  // namespace

void AppendKvCpu(const AppendParams& p, Executor& executor) {
  const bool wide_source = p.k.dtype() == DType::kFloat32;
  const bool wide_kv = p.kv.layout.dtype == DType::kFloat32;
  if (wide_source) {
    wide_kv ? Append<float, float>(p, executor) : Append<float, BFloat16>(p, executor);
  } else {
    wide_kv ? Append<BFloat16, float>(p, executor) : Append<BFloat16, BFloat16>(p, executor);
  }
}

}  // namespace kvasir::kernels
