// Shapes, selections and comparisons of the tests of attend.h. AttendTest runs every implementation
// of a CPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/attend_implementations.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

inline constexpr uint64_t kWholePage = ~uint64_t{0};

class AttendTest : public ::testing::TestWithParam<AttendImplementation> {
 protected:
  void Run(AttentionBatch& batch) { batch.Run(GetParam().run); }
};

inline SelectionEntry Whole(int64_t page) {
  return {.page = page, .chosen = kWholePage, .live = kWholePage};
}

// Every page, as a list.
inline RowSelection ListOfEverything(int64_t first_position) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page <= first_position / kPageTokens; ++page) {
    entries.push_back(Whole(page));
  }
  return SelectList(0, first_position, std::move(entries));
}

// Some pages with random token masks, no sink, and a window of the tile's own tokens.
inline RowSelection ListWithHoles(int64_t first_position, std::mt19937_64& rng) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page < first_position / kPageTokens; ++page) {
    if (rng() % 3 == 0) {
      entries.push_back({.page = page, .chosen = kWholePage, .live = rng() & rng()});
    }
  }
  return SelectList(0, first_position, std::move(entries));
}

inline std::vector<AttentionShape> Shapes() {
  std::vector<AttentionShape> shapes;
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t head_dim : {64, 128, 24}) {
        for (const int64_t group : {1, 2, 3, 4, 5, 7, 8}) {
          if (head_dim != 64 && group != 4) continue;
          shapes.push_back({.activation = activation,
                            .kv = kv,
                            .head_dim = head_dim,
                            .kv_heads = 2,
                            .group = group});
        }
      }
    }
  }
  return shapes;
}

inline std::string Describe(const AttentionShape& shape) {
  return std::string("activation ") + DTypeName(shape.activation).data() + " kv " +
         DTypeName(shape.kv).data() + " head_dim " + std::to_string(shape.head_dim) + " group " +
         std::to_string(shape.group);
}

inline std::vector<AttentionShape> InvariantShapes() {
  std::vector<AttentionShape> shapes;
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
      for (const auto& [head_dim, group] :
           std::vector<std::pair<int64_t, int64_t>>{{64, 1}, {64, 7}, {128, 3}}) {
        shapes.push_back({.activation = activation,
                          .kv = kv,
                          .head_dim = head_dim,
                          .kv_heads = 1,
                          .group = group});
      }
    }
  }
  return shapes;
}

inline bool SameBits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

// Row `row` of `a` equals row `other` of `b`, bit by bit.
inline void ExpectSameRow(const AttentionBatch& a, int64_t row, const AttentionBatch& b,
                          int64_t other) {
  for (int64_t head = 0; head < a.heads(); ++head) {
    EXPECT_TRUE(SameBits(a.out(row, head), b.out(other, head), a.shape().head_dim))
        << "row " << row << " head " << head;
    EXPECT_EQ(std::bit_cast<uint32_t>(a.lse(row, head)),
              std::bit_cast<uint32_t>(b.lse(other, head)))
        << "row " << row << " head " << head;
  }
}

inline void CopyQuery(AttentionBatch& from, int64_t row, AttentionBatch& to, int64_t other) {
  for (int64_t head = 0; head < from.heads(); ++head) {
    std::copy_n(from.q(row, head), from.shape().head_dim, to.q(other, head));
  }
}

}  // namespace kvasir::kernels
