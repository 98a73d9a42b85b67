// Turns the shape of a call (attend_kernel.h) into template arguments of its kernel.
#pragma once

#include "kernels/attention/attend_kernel.h"
#include "kernels/base/head_dim.h"

namespace kvasir::kernels {

// Calls call.operator()<head_dim, placement, has_codes>(). REQUIRES: head_dim is 64 or 128.
template <typename Call>
auto ForShape(const AttendShape& shape, const Call& call) {
  return ForHeadDim(shape.head_dim, [&]<int kHeadDim>() {
    const auto for_placement = [&]<Placement kPlacement>() {
      return shape.has_codes ? call.template operator()<kHeadDim, kPlacement, true>()
                             : call.template operator()<kHeadDim, kPlacement, false>();
    };
    switch (shape.placement) {
      case Placement::kCached:
        break;
      case Placement::kCompact:
        return for_placement.template operator()<Placement::kCompact>();
      case Placement::kGrouped:
        return for_placement.template operator()<Placement::kGrouped>();
    }
    return for_placement.template operator()<Placement::kCached>();
  });
}

}  // namespace kvasir::kernels
