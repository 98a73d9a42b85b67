// Rotary position embedding in the rotate-half layout of Llama: element i of a head pairs with
// element i + D/2. The angles of a step are computed once, in a RopeTable, and used by all layers:
//
//   angle[t, i]  = positions[t] * inv_freq[i]                     float64
//   cos[t, i]    = float32(cos(angle) * attention_scaling), and the same for sin
//   x[t, h, i]        = x_i * cos - x_{i+D/2} * sin               float32, rounded to x's dtype
//   x[t, h, i + D/2]  = x_{i+D/2} * cos + x_i * sin
//
// Scaled variants (linear, NTK, YaRN, llama3) differ only in inv_freq and attention_scaling, which
// the model computes. Source: arXiv 2104.09864, in Hugging Face's layout.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/dtype.h"
#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

// Thread-compatible: filled at the start of a step, then only read.
class RopeTable {
 public:
  // `inv_freq` has head_dim / 2 values.
  RopeTable(std::span<const double> inv_freq, double attention_scaling);

  // Computes the table for these positions; any int64 value is allowed. Memory grows to the largest
  // step seen and is kept.
  void SetPositions(std::span<const int64_t> positions, Executor& executor);

  int64_t num_tokens() const { return num_tokens_; }
  int64_t half_dim() const { return static_cast<int64_t>(inv_freq_.size()); }
  // [num_tokens][half_dim]
  const float* cos() const { return cos_.data(); }
  const float* sin() const { return sin_.data(); }

 private:
  // Constant after construction.
  std::vector<double> inv_freq_;
  double attention_scaling_;
  int64_t num_tokens_ = 0;
  std::vector<float> cos_;
  std::vector<float> sin_;
};

// The angles of all positions from 0 on, kept from step to step, for keys that are cached
// un-rotated and get their positions from a selection (paged/compact_positions.h). Rotate gives the
// bits of ApplyRope. Thread-compatible: Reserve, then only read.
class RopePositions {
 public:
  // Parameters as for RopeTable.
  RopePositions(std::span<const double> inv_freq, double attention_scaling);

  // Computes the positions below `end`. Each takes 4 * head_dim bytes, which are kept.
  void Reserve(int64_t end, Executor& executor);

  int64_t end() const { return end_; }
  int64_t head_dim() const { return 2 * static_cast<int64_t>(inv_freq_.size()); }
  // Angles of one position, [head_dim / 2]. REQUIRES: 0 <= position < end().
  const float* cos(int64_t position) const { return cos_.data() + position * head_dim() / 2; }
  const float* sin(int64_t position) const { return sin_.data() + position * head_dim() / 2; }
  std::span<const double> inv_freq() const { return inv_freq_; }  // [head_dim / 2]
  // Factor of every rotation, even at position 0.
  double attention_scaling() const { return attention_scaling_; }
  // Rotates x [num_tokens, head_dim], float32 or bfloat16, in place. Token t is at position first +
  // t. REQUIRES: 0 <= first, first + num_tokens <= end().
  void Rotate(void* x, DType dtype, int64_t num_tokens, int64_t first) const;

 private:
  // Constant after construction.
  std::vector<double> inv_freq_;
  double attention_scaling_;
  int64_t end_ = 0;
  std::vector<float> cos_;  // [end][half_dim]
  std::vector<float> sin_;
};

// The same angles in device memory, for the GPU's kernels (rope_positions_cuda.h). A view.
struct DeviceRopePositions {
  const float* cos = nullptr;  // [end][head_dim / 2]; null: keys are cached rotated
  const float* sin = nullptr;
  int64_t end = 0;
  float attention_scaling = 1;
  const double* inv_freq = nullptr;  // [head_dim / 2]

  constexpr bool on() const { return cos != nullptr; }
};

// Rotates x [tokens, heads, head_dim], float32 or bfloat16, in place. tokens = table.num_tokens(),
// head_dim = 2 * table.half_dim(). Infinities and NaNs spread only within their pair.
// INVALID_ARGUMENT: shapes, dtypes. UNIMPLEMENTED: CUDA memory.
absl::Status ApplyRope(const RopeTable& table, const TensorView& x, Executor& executor);

}  // namespace kvasir::kernels
