// Gathers rows of a table: the token embedding, and the selection of the rows of hidden states that
// go to the output head. y[t, :] = table[ids[t], :].
#pragma once

#include "absl/status/status.h"

#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct EmbeddingParams {
  TensorView table;  // [num_rows, dim] any dtype
  TensorView ids;    // [tokens] int32; tokens may be 0
  TensorView y;      // [tokens, dim] as table; must not overlap it
};

// OUT_OF_RANGE: an id outside [0, num_rows); nothing is written then. INVALID_ARGUMENT: shapes,
// dtypes. UNIMPLEMENTED: CUDA memory.
absl::Status Embedding(const EmbeddingParams& params);

}  // namespace kvasir::kernels
