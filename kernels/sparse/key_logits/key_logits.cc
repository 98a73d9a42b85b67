#include "kernels/sparse/key_logits/key_logits.h"

#include <atomic>
#include <bit>
#include <limits>

#include "kernels/append/key_code_math.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kCacheLine = 64;

}  // namespace

void LoadQuery(const SelectRow& row, int64_t r, int64_t g, float* to) {
  const int64_t d = row.p.kv.layout.head_dim;
  const int64_t begin = row.q_row(r, g) * d;
  const TensorView& q = row.p.q;
  if (q.dtype() == DType::kFloat32) {
    std::copy_n(q.As<const float>() + begin, d, to);
  } else {
    const auto* from = q.As<const BFloat16>() + begin;
    std::transform(from, from + d, to, [](BFloat16 x) { return static_cast<float>(x); });
  }
}

void RotateToDistance(const SelectRow& row, int64_t distance, float* query) {
  const RopePositions* rope = row.p.rope;
  if (rope == nullptr) return;
  rope->Rotate(query, DType::kFloat32, 1, distance);
  // Scales as a rotation to position 0 would.
  const auto scaling = static_cast<float>(rope->attention_scaling());
  for (int64_t i = 0; i < rope->head_dim(); ++i) query[i] *= scaling;
}

void LoadDistantQuery(const SelectRow& row, int64_t r, int64_t g, float* to) {
  LoadQuery(row, r, g, to);
  RotateToDistance(row, SelectionDistance(row.numbers, r), to);
}

std::byte* KeysOfPage(const SelectRow& row, int64_t page) {
  const PageRef ref = row.p.kv.Find(row.tile.slot, page, row.p.layer, row.kv_head);
  if (ref.tier() != PageTier::kAbsent) return ref.page();
  std::atomic_ref<uint8_t>(row.p.faults[static_cast<size_t>(row.tile.slot)])
      .store(1, std::memory_order_relaxed);
  return nullptr;
}

PageLogits::Memory::Memory(ScratchPieces& pieces, const KvLayout& layout, int64_t num_queries)
    : logits(pieces.Take<float>(num_queries * kTileKeys)),
      keys(pieces.Take<std::byte>(DequantizedPageBytes(layout) / 2)) {}

PageLogits::PageLogits(const SelectRow& row, const TileQueries& queries, const Memory& memory)
    : row_(row),
      queries_(queries),
      memory_(memory),
      function_(row.p.kv.layout.dtype == DType::kFloat32 ? ChosenKeyTile().key_logits_float32
                                                         : ChosenKeyTile().key_logits_bfloat16) {}

void PageLogits::Multiply(const KeyPage& page) const {
  if (page.keys == nullptr) {
    std::fill_n(memory_.logits, queries_.count * kTileKeys,
                -std::numeric_limits<float>::infinity());
    return;
  }
  const KvLayout& layout = row_.p.kv.layout;
  const std::byte* keys =
      ReadKeys(layout, page.keys, TokenMask(0, kPageTokens), page.next_keys, memory_.keys);
  function_({.keys = keys, .next_keys = IsQuantized(layout.dtype) ? nullptr : page.next_keys},
            queries_, memory_.logits);
}

KeyLogits::Memory::Memory(ScratchPieces& pieces, const SelectParams& p) {
  const int64_t d = p.kv.layout.head_dim;
  const int64_t angles = p.rope == nullptr ? 0 : d / 2;
  tile = pieces.Take<float>(d * kTileKeys);
  cos = pieces.Take<float>(angles * kTileKeys);
  sin = pieces.Take<float>(angles * kTileKeys);
  keys = pieces.Take<BFloat16>(IsQuantized(p.kv.layout.dtype) ? d * kTileKeys : 0);
}

KeyLogits::KeyLogits(const SelectRow& row, KeyForm form, const Memory& memory)
    : row_(row),
      form_(form),
      memory_(memory),
      functions_(ChosenKeyTile()),
      head_dim_(row.p.kv.layout.head_dim),
      key_bytes_(form == KeyForm::kCached ? row.p.kv.layout.row_bytes()
                                          : row.p.kv.layout.key_code_words() * 4) {}

void KeyLogits::FindPage(int64_t page) {
  page_ = page;
  page_memory_ = nullptr;
  const PagedKv& kv = row_.p.kv;
  if (form_ == KeyForm::kCodes) {
    if (kv.extent(row_.tile.slot, page) < 0) return;
    page_memory_ = kv.KeyCodes(row_.tile.slot, page, row_.p.layer, row_.kv_head);
    return;
  }
  page_memory_ = KeysOfPage(row_, page);
}

void KeyLogits::Find(int64_t token, int64_t column, Found& found) {
  const auto i = static_cast<size_t>(column);
  found.keys[i] = nullptr;
  if (token == kNoToken) return;
  if (token / kPageTokens != page_) FindPage(token / kPageTokens);
  if (page_memory_ == nullptr) return;
  found.keys[i] = page_memory_ + token % kPageTokens * key_bytes_;
  for (int64_t at = 0; at < key_bytes_; at += kCacheLine) __builtin_prefetch(found.keys[i] + at);
  if (form_ == KeyForm::kCached) {
    const KvLayout& layout = row_.p.kv.layout;
    if (!IsQuantized(layout.dtype)) return;
    found.powers[i] = page_memory_ + layout.scales_offset() + token % kPageTokens;
    __builtin_prefetch(found.powers[i]);
    return;
  }
  const TokenCodes codes(row_.p.kv.layout, page_memory_, token % kPageTokens);
  found.scales[i] = codes.scale;
  found.zeros[i] = codes.zero;
  __builtin_prefetch(codes.scale);
  __builtin_prefetch(codes.zero);
}

void KeyLogits::Pack(const Found& found) {
  missing_ = 0;
  for (size_t i = 0; i < kTileKeys; ++i) {
    if (found.keys[i] == nullptr) missing_ |= uint64_t{1} << i;
  }
  if (form_ == KeyForm::kCached) return PackCached(found);
  CodedKeys coded;
  for (size_t i = 0; i < kTileKeys; ++i) {
    coded.words[i] = reinterpret_cast<const uint32_t*>(found.keys[i]);
    const bool is_there = found.keys[i] != nullptr;
    coded.scales[i] = is_there ? static_cast<float>(*found.scales[i]) : 0.0f;
    coded.zeros[i] = is_there ? static_cast<float>(*found.zeros[i]) : 0.0f;
  }
  functions_.pack_codes(coded, head_dim_, memory_.tile);
}

void KeyLogits::PackCached(const Found& found) {
  const KvLayout& layout = row_.p.kv.layout;
  const void* keys[kTileKeys];
  for (size_t i = 0; i < kTileKeys; ++i) {
    keys[i] = found.keys[i];
    if (found.keys[i] == nullptr || !IsQuantized(layout.dtype)) continue;
    BFloat16* const key = memory_.keys + static_cast<int64_t>(i) * head_dim_;
    DequantizeToken(layout, found.keys[i], found.powers[i], key);
    keys[i] = key;
  }
  const bool is_float = layout.dtype == DType::kFloat32;
  (is_float ? functions_.pack_float32 : functions_.pack_bfloat16)(keys, head_dim_, memory_.tile);
}

void KeyLogits::RotateTo(const std::array<int64_t, kTileKeys>& positions) {
  const void *cos[kTileKeys], *sin[kTileKeys];
  for (size_t i = 0; i < kTileKeys; ++i) {
    cos[i] = row_.p.rope->cos(positions[i]);
    sin[i] = row_.p.rope->sin(positions[i]);
  }
  functions_.pack_float32(cos, head_dim_ / 2, memory_.cos);
  functions_.pack_float32(sin, head_dim_ / 2, memory_.sin);
  functions_.rotate(memory_.cos, memory_.sin, head_dim_, memory_.tile);
}

void KeyLogits::ClearMissing(float* logits) const {
  for (uint64_t rest = missing_; rest != 0; rest &= rest - 1) {
    logits[std::countr_zero(rest)] = -std::numeric_limits<float>::infinity();
  }
}

void KeyLogits::Logits(const float* queries, int64_t num_queries, float* logits) const {
  functions_.logits({.queries = queries, .count = num_queries, .head_dim = head_dim_}, memory_.tile,
                    logits);
  for (int64_t q = 0; q < num_queries; ++q) ClearMissing(logits + q * kTileKeys);
}

void KeyLogits::Best(const float* queries, int64_t num_queries, float* best) const {
  functions_.best({.queries = queries, .count = num_queries, .head_dim = head_dim_}, memory_.tile,
                  best);
  ClearMissing(best);
}

}  // namespace kvasir::kernels
