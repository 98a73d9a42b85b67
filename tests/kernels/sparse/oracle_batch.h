// Keys and queries as oracle.py makes them, multiples of 1/8 whose sums are exact, in a batch for
// selectors; and lists as it writes them down. Used by the tests that replay its goldens.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "tests/kernels/sparse/oracle_values.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

using Ranges = std::vector<std::array<int64_t, 2>>;

inline constexpr int64_t kDim = 16, kKvHeads = 2;

// Fills keys [0, context) of both KV heads in slot 0, in runs of `run` equal keys, except specials.
inline void FillKeys(const nlohmann::json& c, int64_t context, AttentionBatch& batch) {
  batch.FillContext(0, context);
  const auto key = [&](int64_t t, int64_t head) {
    return batch.kv().Token(FakePagedKv::Side::kKey, 0, t, batch.shape().layer, head);
  };
  for (int64_t head = 0; head < kKvHeads; ++head) {
    for (int64_t t = 0; t < context; ++t) {
      for (int64_t i = 0; i < batch.shape().head_dim; ++i) {
        batch.kv().Set(
            key(t, head), i,
            OracleValue(c["seed"], OracleSide::kKey, t / c["run"].get<int64_t>(), head, i));
      }
    }
    for (const nlohmann::json& special : c["specials"]) {
      batch.kv().Set(key(special[0], head), 0, std::stof(special[1].get<std::string>()));
    }
  }
  for (int64_t block = 0; block * kPageTokens < context; ++block) {
    const int64_t tokens = std::min(kPageTokens, context - block * kPageTokens);
    ASSERT_TRUE(RebuildBounds(batch.kv().View(), 0, block, tokens).ok());
    ASSERT_TRUE(RebuildKeyCodes(batch.kv().View(), 0, block, tokens).ok());
  }
}

// One block of all queries of the case.
inline void FillQueries(const nlohmann::json& c, AttentionBatch& batch) {
  const int64_t first = c["first"], rows = c["rows"];
  batch.AddBlock(0, first, rows);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      for (int64_t i = 0; i < batch.shape().head_dim; ++i) {
        batch.q(r, head)[i] = OracleValue(c["seed"], OracleSide::kQuery, first + r, head, i);
      }
    }
  }
}

// Tokens of the list that `mask` names: all, or those between sink and window only.
enum class Within { kAll, kSparseRange };
inline Ranges ListedRanges(const SelectionHeader& header, const SelectionEntry* list,
                           uint64_t SelectionEntry::*mask, Within within) {
  Ranges ranges;
  for (int32_t i = 0; i < header.count; ++i) {
    for (int64_t t = 0; t < kPageTokens; ++t) {
      if ((list[i].*mask >> t & 1) == 0) continue;
      const int64_t token = list[i].page * kPageTokens + t;
      const bool sparse = token >= header.sink_end && token < header.window_begin;
      if (within == Within::kSparseRange && !sparse) continue;
      if (ranges.empty() || ranges.back()[1] != token) ranges.push_back({token, token});
      ranges.back()[1] = token + 1;
    }
  }
  return ranges;
}

}  // namespace kvasir::kernels
