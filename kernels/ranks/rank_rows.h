// Rows of values of which each rank of a group has its own, before they become one over the ranks:
// a sum or the largest. Plain data.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

template <typename Value>
struct RankRows {
  Value* values = nullptr;  // [rows, stride]
  // [rows]: how many values of a row, from its first on, are to become one; what others become is
  // unspecified. Null: all of them. Device memory, the same on every rank.
  const int32_t* counts = nullptr;
  int64_t rows = 0;
  int64_t stride = 0;
};

}  // namespace kvasir::kernels
