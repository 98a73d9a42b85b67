// Head dimensions that kernels on the GPU with a variant for each serve: 64 and 128.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

// Returns call.operator()<head_dim>(). REQUIRES: head_dim is 64 or 128.
template <typename Call>
auto ForHeadDim(int64_t head_dim, const Call& call) {
  return head_dim == 128 ? call.template operator()<128>() : call.template operator()<64>();
}

}  // namespace kvasir::kernels
