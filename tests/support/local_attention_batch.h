// Attention batches whose queries see some of their tokens only, by as much as a test says: what
// may be left unread, and what may not. Keys are cached rotated or un-rotated. Thread-compatible.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/append/digests.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

// Logits of a peak of 1 that are higher by one for queries of kPeakQuery.
inline constexpr float kPeakQuery = 8;

// Whether keys are cached rotated, or rows attend at compact positions.
enum class Keys { kRotated, kUnrotated };
inline constexpr Keys kBothKeys[] = {Keys::kRotated, Keys::kUnrotated};
inline std::string PartOfCaseName(Keys keys) {
  return keys == Keys::kRotated ? "rotated" : "unrotated";
}

inline AttentionBatch MakeBatch(const AttentionShape& shape, Keys keys, int64_t num_slots,
                                int64_t max_tokens, uint64_t seed) {
  AttentionBatch batch(shape, num_slots, max_tokens, seed);
  if (keys == Keys::kUnrotated) batch.UseCompactPositions();
  return batch;
}

// Calls set(element, x) for what makes a peak of x at a position: element 0, or where keys are
// cached un-rotated, the pair that turns least, turned back.
template <typename Set>
void SetPeak(AttentionBatch& batch, int64_t position, float x, const Set& set) {
  if (batch.rope() == nullptr) return set(0, x);
  const int64_t half = batch.shape().head_dim / 2;
  const double angle = static_cast<double>(position) * batch.InverseFrequency(half - 1);
  set(half - 1, x * static_cast<float>(std::cos(angle)));
  set(2 * half - 1, -x * static_cast<float>(std::sin(angle)));
}

// Makes x / scale / kPeakQuery the peak of the keys of [begin, end) of all heads. REQUIRES: rows
// attend to everything, at the tokens' own positions.
inline void AddPeak(AttentionBatch& batch, int64_t slot, int64_t begin, int64_t end, float x) {
  FakePagedKv& kv = batch.kv();
  const float key = x * std::sqrt(static_cast<float>(batch.shape().head_dim)) / kPeakQuery;
  for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
    for (int64_t t = begin; t < end; ++t) {
      constexpr auto kKey = FakePagedKv::Side::kKey;
      std::vector<float> token = kv.Elements(kKey, slot, t, AttentionBatch::kLayer, head);
      SetPeak(batch, t, key,
              [&](int64_t i, float value) { token[static_cast<size_t>(i)] = value; });
      kv.SetToken(kKey, slot, t, AttentionBatch::kLayer, head, token);
    }
  }
  for (int64_t block = begin / kPageTokens; block * kPageTokens < end; ++block) {
    const int64_t tokens = std::min(kPageTokens, end - block * kPageTokens);
    KVASIR_CHECK(RebuildBounds(kv.View(), slot, block, tokens).ok());
  }
}

// A query at the end of `context` tokens of the slot, whose heads see the last `local` tokens only,
// by as much as `peak`.
inline void AddLocalBlock(AttentionBatch& batch, int64_t slot, int64_t context, int64_t local,
                          float peak,
                          const std::function<RowSelection(int64_t head)>& select = nullptr) {
  batch.FillContext(slot, context);
  AddPeak(batch, slot, 0, context - local, 0);
  AddPeak(batch, slot, context - local, context, peak);
  const int64_t row = batch.num_tokens();
  batch.AddBlock(slot, context - 1, 1, select);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    SetPeak(batch, context - 1, kPeakQuery,
            [&](int64_t i, float value) { batch.q(row, head)[i] = value; });
  }
}

}  // namespace kvasir::kernels
