// The guard of `art`: how much attention mass the pages that a row has not read may hold at most,
// from their page bounds. Made once for a row; then a look-up for each page.
//
// Where keys are cached un-rotated, so are the bounds, and a page's tokens stand at distances of
// [D - h, D + h] from the query. Let u be the query rotated to D; of a pair of elements (u_i, u_j)
// with frequency f, and r the length of the longest corner of the page's box in that pair:
//
//   logit of the pair  <=  min(|u| r, bound of the box under u + |u| r f h)
//
// for the query turns by f h at most between D and a token's distance. Rounding to bfloat16 what
// was rotated may add 1/128 of |u| r. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/terminator.h"
#include "kernels/base/scratch.h"

namespace kvasir::kernels {

class UnreadMass {
 public:
  struct Memory {
    // [2 * head_dim], or bfloat16; where keys are cached un-rotated: the query, and it rotated.
    float* signed_q = nullptr;
    std::byte* workspace = nullptr;  // of the score function
    double* sums = nullptr;          // [group, skippable + 1]
    double* units = nullptr;         // [group]
  };
  static Memory Take(ScratchPieces& pieces, int64_t group, int64_t head_dim, int64_t skippable);

  // `row` outlives it.
  UnreadMass(const TerminatedRow& row, const Memory& memory) : row_(row), memory_(memory) {}

  bool is_made() const { return is_made_; }
  void Make();

  // REQUIRES of the following: is_made().

  // Upper bound of the mass of skippable[next] and behind, over what the head has: `seen`.
  double Share(const AttentionState& seen, int64_t g, int64_t next) const;
  // False: Share is not below `limit`, not even once skippable[next - 1] has been read, which can
  // add no more than its own bound.
  bool MayFallBelow(double limit, const AttentionState& seen, int64_t g, int64_t next) const;

 private:
  void ScoreHead(int64_t g);
  // Write the upper bounds of the skippable pages' logits.
  void BoundPages(int64_t q_row, double* bounds) const;
  void BoundRotatedPages(int64_t q_row, double* bounds) const;
  // Null where the slot has no such block.
  const std::byte* PageBounds(const PageStep& step) const;
  // Sum of n_u exp(b_u - unit) over the skippable pages from `next` on.
  double Sum(int64_t g, int64_t next) const {
    return memory_.sums[g * (std::ssize(row_.skippable) + 1) + next];
  }

  const TerminatedRow& row_;
  const Memory memory_;
  bool is_made_ = false;
};

}  // namespace kvasir::kernels
