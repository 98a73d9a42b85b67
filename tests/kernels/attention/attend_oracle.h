// The oracle of attention: the formula of attend.h in double precision, token by token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/attention/attend.h"
#include "tests/support/attention_batch.h"
#include "tests/support/compare.h"

namespace kvasir::kernels {

struct OracleResult {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};

inline bool Selected(const RowSelection& row, int64_t token) {
  const SelectionHeader& header = row.header;
  if (header.kind == SelectionHeader::Kind::kAll) return true;
  if (token < header.sink_end || token >= header.window_begin) return true;
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& entry = row.entries[static_cast<size_t>(i)];
    if (entry.page == token / kPageTokens) return (entry.live >> (token % kPageTokens) & 1) != 0;
  }
  return false;
}

// Returns a compact position: a token's own, or its rank among sink, chosen tokens and window.
inline int64_t CompactPosition(const RowSelection& row, int64_t token) {
  const SelectionHeader& header = row.header;
  if (header.kind == SelectionHeader::Kind::kAll || token < header.sink_end) return token;
  int64_t position = header.sink_end;
  for (const SelectionEntry& entry : row.entries) {
    for (int64_t t = 0; t < kPageTokens; ++t) {
      if ((entry.chosen >> t & 1) == 0) continue;
      if (entry.page * kPageTokens + t == token && token < header.window_begin) return position;
      ++position;
    }
  }
  return position + token - header.window_begin;
}

// Positions at which a query sees a key.
struct Places {
  int64_t query = 0;
  int64_t key = 0;
};

// SelfExtend as in its paper: within the window both at their own positions, else by groups.
inline Places GroupedPlaces(const GroupedPositions& grouped, int64_t query, int64_t key) {
  const int64_t g = grouped.group_size, w = grouped.window;
  if (query - key < w) return {.query = query, .key = key};
  return {.query = query / g + w - w / g, .key = key / g};
}

// Returns x, rotated when the batch's keys and queries are not.
inline std::vector<double> Rotated(AttentionBatch& batch, std::vector<double> x, int64_t position) {
  if (batch.rope() == nullptr) return x;
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) * batch.InverseFrequency(static_cast<int64_t>(i));
    const double c = std::cos(angle) * batch.rope()->attention_scaling();
    const double s = std::sin(angle) * batch.rope()->attention_scaling();
    const double first = x[i], second = x[i + half];
    x[i] = first * c - second * s;
    x[i + half] = second * c + first * s;
  }
  return x;
}

inline OracleResult Oracle(AttentionBatch& batch, int64_t block_index, int64_t row, int64_t head) {
  const QueryTile& tile = batch.blocks()[static_cast<size_t>(block_index)];
  const int64_t kv_head = head / batch.shape().group;
  const int64_t d = batch.shape().head_dim;
  const RowSelection& selection = batch.selection(block_index, kv_head);
  const float* raw_q = batch.q(tile.first_row + row, head);
  const int64_t position = tile.first_position + row;
  std::vector<double> q;  // at q_position
  int64_t q_position = -1;
  const double scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<int64_t> tokens;
  std::vector<double> logits;
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t token = 0; token <= tile.first_position + row; ++token) {
    if (!Selected(selection, token)) continue;
    if (batch.window_tokens() != 0 && position - token >= batch.window_tokens()) continue;
    const std::byte* key = batch.kv().Token(FakePagedKv::Side::kKey, tile.slot, token,
                                            AttentionBatch::kLayer, kv_head);
    std::vector<double> k;
    for (int64_t i = 0; i < d; ++i) k.push_back(double{batch.kv().Get(key, i)});
    const Places places = batch.grouped().on()
                              ? GroupedPlaces(batch.grouped(), position, token)
                              : Places{.query = CompactPosition(selection, position),
                                       .key = CompactPosition(selection, token)};
    if (places.query != q_position) {
      q_position = places.query;
      q = Rotated(batch, {raw_q, raw_q + d}, q_position);
    }
    k = Rotated(batch, std::move(k), places.key);
    const double dot = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
    tokens.push_back(token);
    logits.push_back(dot * scale);
    max = std::max(max, logits.back());
  }
  OracleResult result;
  result.out.resize(static_cast<size_t>(d));
  double sum = 0;
  for (size_t j = 0; j < tokens.size(); ++j) {
    const double weight = std::exp(logits[j] - max);
    sum += weight;
    const std::byte* value = batch.kv().Token(FakePagedKv::Side::kValue, tile.slot, tokens[j],
                                              AttentionBatch::kLayer, kv_head);
    for (int64_t i = 0; i < d; ++i) {
      result.out[static_cast<size_t>(i)] += weight * double{batch.kv().Get(value, i)};
    }
  }
  if (tokens.empty()) return result;
  for (double& x : result.out) x /= sum;
  result.lse = max + std::log(sum);
  return result;
}

// Outputs are averages of standard normal values: absolute tolerance. lse: relative when large.
inline void ExpectMatchesOracle(AttentionBatch& batch) {
  const bool bf16 = batch.shape().activation == DType::kBFloat16;
  // Rotated values are rounded to their previous dtype.
  const bool rounds = batch.rope() != nullptr && (bf16 || batch.shape().kv == DType::kBFloat16);
  const tests::Tolerance out_tolerance = {.absolute = rounds ? 2e-2
                                                      : bf16 ? 1e-2
                                                             : 5e-6,
                                          .relative = bf16 ? 4e-3 : 5e-6};
  const tests::Tolerance lse_tolerance = {.absolute = rounds ? 2e-2 : 2e-6, .relative = 1e-6};
  const int64_t d = batch.shape().head_dim;
  std::vector<double> out, expected_out, lse, expected_lse;
  for (size_t b = 0; b < batch.blocks().size(); ++b) {
    const QueryTile& tile = batch.blocks()[b];
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      for (int64_t head = 0; head < batch.heads(); ++head) {
        const int64_t token = tile.first_row + r;
        const OracleResult expected = Oracle(batch, static_cast<int64_t>(b), r, head);
        expected_out.insert(expected_out.end(), expected.out.begin(), expected.out.end());
        expected_lse.push_back(expected.lse);
        out.insert(out.end(), batch.out(token, head), batch.out(token, head) + d);
        lse.push_back(batch.lse(token, head));
      }
    }
  }
  const int64_t tokens = batch.num_tokens();
  EXPECT_TRUE(tests::AllClose(lse, expected_lse, lse_tolerance, {tokens, batch.heads()})) << "lse";
  EXPECT_TRUE(tests::AllClose(out, expected_out, out_tolerance, {tokens, batch.heads(), d}))
      << "out";
}

}  // namespace kvasir::kernels
