// Internal to this folder: code shared by an op's CPU and GPU forms: the shape check, and the
// params in the form of the row loops. Stateless.
#pragma once

#include "absl/status/status.h"

#include "kernels/dense/elementwise.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/random_fill.h"
#include "kernels/dense/random_rows.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"

namespace kvasir::kernels {

absl::Status CheckRmsNorm(const RmsNormParams& params);
absl::Status CheckSiluMul(const SiluMulParams& params);
absl::Status CheckEmbedding(const EmbeddingParams& params);
absl::Status CheckRandomFill(const RandomFillParams& params);

// REQUIRES: the params have been checked.
SiluMulRows RowsOf(const SiluMulParams& params);
RandomRows RowsOf(const RandomFillParams& params);

}  // namespace kvasir::kernels
