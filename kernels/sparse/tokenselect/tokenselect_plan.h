// Which kernels serve a call of tokenselect on the GPU, and their CTAs. Needs no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "kernels/sparse/common/select_shape.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Most CTAs that compute a row's logits.
inline constexpr int kLogitBlocks = 256;

struct TokenSelectPlan {
  enum class Logits { kPlain, kOneTile, kTwoTiles };  // plain: of float32 keys; products: of tiles

  SelectShape shape;
  Logits logits = Logits::kPlain;
  int64_t logit_ctas_of_row = 1;
  int voters = 0;  // most heads that the kernel which votes holds; 0: it takes a layer's votes
};

// The CTAs of a row are two on each multiprocessor where there is one sequence. The number does not
// depend on the batch, because the way a row is divided decides how its sums are rounded.
// `kv_heads`: of the call; at layer scope of the layer, whatever ranks hold them, for the same
// reason.
inline TokenSelectPlan PlanTokenSelect(const SelectShape& shape, Scope scope, int64_t kv_heads,
                                       int num_processors) {
  using Logits = TokenSelectPlan::Logits;
  constexpr int64_t kPagesOfCta = 4;  // at least
  const int64_t useful = (shape.max_pages + kPagesOfCta - 1) / kPagesOfCta;
  const int64_t share = 2 * num_processors / kv_heads;
  const bool is_small = shape.group <= 4;
  return {.shape = shape,
          .logits = shape.kv == DType::kFloat32 ? Logits::kPlain
                    : is_small                  ? Logits::kOneTile
                                                : Logits::kTwoTiles,
          .logit_ctas_of_row = std::clamp<int64_t>(std::min(useful, share), 1, kLogitBlocks),
          .voters = scope == Scope::kLayer ? 0
                    : is_small             ? 4
                                           : 8};
}

inline std::ostream& operator<<(std::ostream& out, const TokenSelectPlan& plan) {
  using Logits = TokenSelectPlan::Logits;
  out << plan.shape << ": ";
  switch (plan.logits) {
    case Logits::kPlain:
      out << "plain logits";
      break;
    case Logits::kOneTile:
      out << "logits by products of one tile";
      break;
    case Logits::kTwoTiles:
      out << "logits by products of two tiles";
      break;
  }
  out << " in " << plan.logit_ctas_of_row << " CTAs a row, ";
  if (plan.voters == 0) return out << "votes of the layer";
  return out << "votes of up to " << plan.voters << " heads";
}

}  // namespace kvasir::kernels
