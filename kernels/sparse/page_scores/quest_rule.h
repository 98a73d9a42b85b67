// The score by which the selector `quest` (quest_selector.h) ranks pages: the one definition for
// CPU and GPU.
//
// For a channel d of a query, low_d <= high_d are its products with the smallest and the largest
// element of the page's keys. A page's score is a sum over its channels:
//
//   bound      sum of high_d               no logit of the page is larger (Quest)
//   estimate   sum of high_d + low_d / 2   1.5 times the value that lies a third of the way from
//                                          the logit of the bounds' centre to the bound
//
// Only a key that is extreme in every channel, in the query's direction, reaches the bound. Such
// keys are rare, because their channels differ in sign. So the bound favours pages of wide bounds,
// and the estimate is the better order. Its weight is a power of two, so it is as exact in bfloat16
// as the bound.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"

namespace kvasir::kernels {

enum class QuestScore : uint8_t { kBound, kEstimate };

// Weight of a channel's smaller product.
constexpr float LowWeight(QuestScore score) { return score == QuestScore::kBound ? 0.0f : 0.5f; }

// The parts of a query that make a score one dot product with (min, max), the order of bounds in
// memory. NaN goes to both.
KVASIR_HOST_DEVICE inline float Weighted(float q, float low_weight) {
  return low_weight == 0 ? 0.0f : low_weight * q;  // 0 for an infinite q, too
}
KVASIR_HOST_DEVICE inline float ForMin(float q, float low_weight) {
  return q > 0 ? Weighted(q, low_weight) : q;
}
KVASIR_HOST_DEVICE inline float ForMax(float q, float low_weight) {
  return q < 0 ? Weighted(q, low_weight) : q;
}

}  // namespace kvasir::kernels
