// The guard of `art`: an upper bound, from page bounds, of the attention mass in the pages that a
// row has not read. Made once for a row; then one look-up per page.
//
// Where keys are cached un-rotated, so are the bounds, and a page's tokens are at distances of [D -
// h, D + h] from the query. Let u be the query rotated to D. For a pair of elements (u_i, u_j) with
// frequency f, let r be the length of the longest corner of the page's box in that pair. Then
//
//   logit of the pair  <=  min(|u| r, bound of the box under u + |u| r f h)
//
// because the query turns by at most f h between D and a token's distance. Rounding the rotated
// values to bfloat16 may add 1/128 of |u| r. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/terminator.h"
#include "kernels/base/scratch.h"

namespace kvasir::kernels {

class UnreadMass {
 public:
  struct Memory {
    // [2 * head_dim], float32 or bfloat16. Where keys are cached un-rotated: the query, then the
    // rotated query.
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

  // The functions below REQUIRE is_made().

  // Upper bound of the mass of the pages from skippable[next] on, relative to the mass that the
  // head has in `seen`.
  double Share(const AttentionState& seen, int64_t g, int64_t next) const;
  // Returns false if Share stays at or above `limit` even once skippable[next - 1] has been read,
  // which can add no more than its own bound.
  bool MayFallBelow(double limit, const AttentionState& seen, int64_t g, int64_t next) const;

 private:
  void ScoreHead(int64_t g);
  // Write the upper bounds of the logits of the skippable pages.
  void BoundPages(int64_t q_row, double* bounds) const;
  void BoundRotatedPages(int64_t q_row, double* bounds) const;
  // Null if the slot has no such block.
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
