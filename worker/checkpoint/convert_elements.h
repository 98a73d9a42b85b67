// Converts weights from the dtype of a file to the dtype that a worker computes in, and finds
// values that are not finite. Called by weights.cc. A function without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"

namespace kvasir::worker {

// Writes the elements of `in` (dtype `from`) to `out` as `to`, rounding to nearest even. Returns
// the index of the first element that is NaN or infinite, in `in` or in the result, and -1 when all
// are finite. `out` holds as many elements as `in`. They do not overlap, or `out` is `in` where the
// dtypes are the same. from: float32, bfloat16, float16; to: float32, bfloat16.
int64_t ConvertElements(kernels::DType from, std::span<const std::byte> in, kernels::DType to,
                        std::byte* out);

}  // namespace kvasir::worker
