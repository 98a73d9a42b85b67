// Logits of single cached keys, for selectors and pruners that read keys or their codes: q . k in
// float32, not scaled.
// Keys are read where they lie, without an access record (see Selector::Select). The sum over
// head_dim runs in 16 partial sums, added up in order, so that it is the same on every machine.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {

// Copies query r of the row's block and head g of its group to `to` [head_dim].
void LoadQuery(const SelectRow& row, int64_t r, int64_t g, float* to);

// Where keys are cached un-rotated: rotates a query [head_dim] so that its products with them are
// logits at `distance`. Else leaves it as it is. REQUIRES: the distance is reserved.
void RotateToDistance(const SelectRow& row, int64_t distance, float* query);

// LoadQuery, at SelectionDistance.
void LoadDistantQuery(const SelectRow& row, int64_t r, int64_t g, float* to);

// Logits of one row's queries and the keys of its slot. It remembers the page it read last.
class KeyLogits {
 public:
  explicit KeyLogits(const SelectRow& row);

  // q . k of the token; -inf, with the slot's fault set, where its page is absent. NaN stays NaN.
  float operator()(const float* q, int64_t token);
  // The same of the key rotated to `position`; `key` is memory for head_dim floats. REQUIRES: keys
  // are cached un-rotated.
  float At(int64_t position, const float* q, int64_t token, float* key);

 private:
  const std::byte* Key(int64_t token);

  const SelectRow& row_;
  const KvLayout& layout_;
  int64_t page_ = -1;
  const std::byte* memory_ = nullptr;  // of page_; null: absent
};

// The same from key codes (kernels/paged/key_codes.h), token by token for many queries: an estimate
// at an eighth of the bytes. REQUIRES: the KV has key codes.
class KeyEstimates {
 public:
  // `key`: memory for head_dim floats.
  KeyEstimates(const SelectRow& row, float* key) : row_(row), key_(key) {}

  void Load(int64_t token);
  // Rotates the loaded key to `position`. REQUIRES: keys are cached un-rotated.
  void Rotate(int64_t position);
  // q . k~ of the loaded token; -inf where the slot has no such block. NaN stays NaN.
  float operator()(const float* q) const;

 private:
  const SelectRow& row_;
  float* const key_;
  bool is_there_ = false;
};

}  // namespace kvasir::kernels
