// Logits of single cached keys, for selectors and pruners that read keys or key codes: q . k in
// float32, unscaled, summed in one order on every machine (key_tile.h). Keys are read where they
// lie and leave no access record (see Selector::Select). Thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/float16.h"
#include "kernels/base/scratch.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/key_logits/key_tile.h"

namespace kvasir::kernels {

// Copies query r of the row's block and head g of its group to `to` [head_dim].
void LoadQuery(const SelectRow& row, int64_t r, int64_t g, float* to);

// Where keys are cached un-rotated, rotates a query [head_dim] so that its products with them are
// logits at `distance`; else leaves the query unchanged. REQUIRES: the distance is reserved.
void RotateToDistance(const SelectRow& row, int64_t distance, float* query);

// LoadQuery, then RotateToDistance to SelectionDistance.
void LoadDistantQuery(const SelectRow& row, int64_t r, int64_t g, float* to);

// Keys of a page of the row's slot and KV head. Null where the slot has no such block, or where the
// page is absent, which also sets the slot's fault.
std::byte* KeysOfPage(const SelectRow& row, int64_t page);

// The form in which keys are read: the cached keys, or their codes (kernels/append/key_codes.h), an
// estimate at an eighth of the bytes. REQUIRES for kCodes: the KV has key codes.
enum class KeyForm { kCached, kCodes };

// Logits of one row's queries and all keys of runs of tokens. Each key is read once, a page at a
// time, without first making a tile.
class PageLogits {
 public:
  struct Memory {
    Memory(ScratchPieces& pieces, const KvLayout& layout, int64_t num_queries);
    float* logits;    // [num_queries, kTileKeys]
    std::byte* keys;  // of a page of quantized KV
  };

  // REQUIRES: the memory is for queries.count.
  PageLogits(const SelectRow& row, const TileQueries& queries, const Memory& memory);

  // Calls use(first, n, logits) for the pages of the tokens [begin, end), ascending. The logits of
  // tokens first + [0, n) are at logits[q * kTileKeys] for each query q, -inf where KeysOfPage is
  // null.
  template <typename Use>
  void ForEachPage(int64_t begin, int64_t end, const Use& use) {
    if (begin >= end) return;
    const std::byte* keys = KeysOfPage(row_, begin / kPageTokens);
    for (int64_t page = begin / kPageTokens; page * kPageTokens < end; ++page) {
      const int64_t page_end = (page + 1) * kPageTokens;
      const std::byte* next_keys = page_end < end ? KeysOfPage(row_, page + 1) : nullptr;
      Multiply({.keys = keys, .next_keys = next_keys});
      const int64_t first = std::max(begin, page * kPageTokens);
      use(first, std::min(end, page_end) - first, memory_.logits + first % kPageTokens);
      keys = next_keys;
    }
  }

 private:
  void Multiply(const KeyPage& page) const;

  const SelectRow& row_;
  const TileQueries queries_;
  const Memory memory_;
  void (*const function_)(const KeyPage&, const TileQueries&, float*);
};

// Logits of one row's queries and any keys of its slot, kTileKeys at a time. The tile's memory is
// borrowed and serves one row at a time.
class KeyLogits {
 public:
  struct Memory {
    Memory(ScratchPieces& pieces, const SelectParams& params);
    float* tile;  // [head_dim, kTileKeys]
    float* cos;   // [head_dim / 2, kTileKeys]; null where keys are cached rotated
    float* sin;
    BFloat16* keys;  // [kTileKeys, head_dim], of quantized KV
  };
  static constexpr int64_t kNoToken = -1;

  KeyLogits(const SelectRow& row, KeyForm form, const Memory& memory);

  // Calls use(first, n) for runs of up to kTileKeys of the keys [0, count), ascending. Until use
  // returns, the tile's column i is the key of token token_at(first + i). Its logits are -inf for
  // kNoToken and where KeysOfPage is null. Coming keys are prefetched: token_at is called one run
  // ahead.
  template <typename TokenAt, typename Use>
  void ForEachTile(int64_t count, const TokenAt& token_at, const Use& use) {
    const auto find = [&](int64_t first, Found& found) {
      for (int64_t i = 0; i < kTileKeys; ++i) {
        const int64_t token = first + i < count ? token_at(first + i) : kNoToken;
        Find(token, i, found);
      }
    };
    if (count > 0) find(0, found_[0]);
    size_t current = 0;
    for (int64_t first = 0; first < count; first += kTileKeys, current ^= 1) {
      if (first + kTileKeys < count) find(first + kTileKeys, found_[current ^ 1]);
      Pack(found_[current]);
      use(first, std::min(kTileKeys, count - first));
    }
  }

  // Rotates the key in column i of the tile to position_at(i), for i in [0, n). REQUIRES: keys are
  // cached un-rotated.
  template <typename PositionAt>
  void Rotate(int64_t n, const PositionAt& position_at) {
    std::array<int64_t, kTileKeys> positions = {};
    for (int64_t i = 0; i < n; ++i) positions[static_cast<size_t>(i)] = position_at(i);
    RotateTo(positions);
  }
  // Writes the tile's logits [num_queries, kTileKeys]. NaN stays NaN.
  void Logits(const float* queries, int64_t num_queries, float* logits) const;
  // Writes for each key of the tile the largest logit over the queries. A NaN counts as -inf.
  void Best(const float* queries, int64_t num_queries, float best[kTileKeys]) const;

 private:
  // Addresses of the keys; null: no key.
  struct Found {
    std::array<const std::byte*, kTileKeys> keys;
    std::array<const std::byte*, kTileKeys> powers;       // of quantized KV: scales
    std::array<const Float16*, kTileKeys> scales, zeros;  // for KeyForm::kCodes
  };
  void Find(int64_t token, int64_t column, Found& found);
  void FindPage(int64_t page);
  void Pack(const Found& found);
  void PackCached(const Found& found);
  void RotateTo(const std::array<int64_t, kTileKeys>& positions);
  void ClearMissing(float* logits) const;

  const SelectRow& row_;
  const KeyForm form_;
  const Memory memory_;
  const KeyTileFunctions& functions_;
  const int64_t head_dim_;
  const int64_t key_bytes_;
  int64_t page_ = kNoToken;
  std::byte* page_memory_ = nullptr;  // keys, or codes, of page_; null: missing
  std::array<Found, 2> found_;
  uint64_t missing_ = 0;  // columns of the tile without a key
};

}  // namespace kvasir::kernels
