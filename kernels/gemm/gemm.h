// Linear layers: y[M, N] = x[M, K] * w[N, K]^T + bias[N].
//
// A PackedLinear owns its weights, re-ordered once into blocks that the machine's fastest kernel
// reads in order, and hides which kernel that is: our own panel kernels, or oneDNN's brgemm for
// bfloat16 on machines with AMX. The model calls it, one object per weight.
//
// Thread-compatible: one Run at a time; Run spreads its work over the executor it is given. oneDNN
// is told to use one OpenMP thread per tile, so there is no second thread pool in the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

class GemmEngine;

// How weights are kept.
enum class WeightForm : uint8_t {
  kAsInput,  // in the dtype of the layer's input
  kInt8,     // 8 bits each, and a bfloat16 scale for each 32 inputs of each output
};

// A linear layer's product with what stands around it in a model:
//
//   x' = norm given ? rms_norm(x, norm, epsilon) : x
//   y  = x' w^T + bias                                kStore
//   y += round(x' w^T + bias)                         kAdd: each element rounded once more,
//                                                     then next_normed = rms_norm(y, next_norm,
//                                                     epsilon) where that norm is given
//   y  = silu(first half) * second half of the same   kSiluMul (silu_mul.h)
//
// where round() is to y's dtype.
struct LinearParams {
  enum class After : uint8_t { kStore, kAdd, kSiluMul };

  TensorView x;          // [M, K], M may be 0
  TensorView norm = {};  // [K] as x, or empty: x as it is
  float epsilon = 0;     // of both norms
  After after = After::kStore;
  TensorView y;  // [M, N], of kSiluMul [M, N / 2]; overlaps nothing else
  // The norm before the layer that reads y next, of kAdd only.
  TensorView next_norm = {};    // [N] as y, or empty: none
  TensorView next_normed = {};  // [M, N] as y; may be x or `normed`
  // Working memory, for what is not done in one pass.
  TensorView normed = {};   // [M, K] where `norm` is given; may be x itself
  TensorView product = {};  // [M, N] as y, where something comes after
};

class PackedLinear {
 public:
  // Parts are stacked along N: {gate, up} gives y = [gate | up].
  struct Part {
    TensorView weight;     // [n, K] float32 or bfloat16, any mix
    TensorView bias = {};  // [n] float32 or bfloat16; an empty view for none
  };
  struct Options {
    DType input = DType::kFloat32;   // of x: float32 or bfloat16
    DType output = DType::kFloat32;  // of y: float32, or bfloat16 when the input is
    WeightForm weights = WeightForm::kAsInput;
  };

  // Copies and packs the weights; the parts may be freed afterwards. They are rounded to bfloat16
  // when the input is bfloat16 and kept in float32 otherwise, or rounded to whole multiples of a
  // scale, which is the bfloat16 at or above 1/127 of the largest of its 32 weights: an error of at
  // most half a scale. Kernels are those of the instruction set in use now (cpu_isa.h).
  // INVALID_ARGUMENT: shapes, dtypes, int8 of weights that are not finite. UNIMPLEMENTED: CUDA
  // memory. RESOURCE_EXHAUSTED: no memory.
  // `memory`, which is needed no longer then, keeps the layers of a model close together.
  static absl::StatusOr<PackedLinear> Create(std::span<const Part> parts, const Options& options,
                                             HostArena& memory);
  // The same in memory of its own.
  static absl::StatusOr<PackedLinear> Create(std::span<const Part> parts, const Options& options);

  PackedLinear(PackedLinear&&) noexcept;
  PackedLinear& operator=(PackedLinear&&) noexcept;
  ~PackedLinear();

  // Bytes of scratch that Run needs for an executor of `num_threads`, whatever the number of rows.
  int64_t ScratchBytes(int num_threads) const;

  //   x        [M, K] options.input, M may be 0
  //   y        [M, N] options.output, must not overlap x
  //   scratch  at least ScratchBytes(executor.num_threads()), aligned to 64 bytes
  //
  // Products and sums are float32. In int8 each 32 inputs of a row of x are rounded to 16 bits, by
  // at most 2^-15 of the largest |x| among them (gemm_panel.h), and their sum is exact before it is
  // scaled. Infinities and NaNs spread within their row as in the formula, except that in int8 an
  // infinity makes its row NaN, and never into another row. With the panel kernels a row of y
  // depends only on its row of x: it is bitwise the same for every M, row index and number of
  // threads, and for every instruction set but AVX512_BF16, which has an order of sums of its own
  // for bfloat16 (gemm_panel.h) and takes denormals for zeros. oneDNN promises none of this.
  // INVALID_ARGUMENT: shapes, dtypes, scratch. UNIMPLEMENTED: CUDA memory. INTERNAL: oneDNN failed.
  absl::Status Run(const TensorView& x, const TensorView& y, std::span<std::byte> scratch,
                   Executor& executor);

  int64_t in_features() const { return in_features_; }
  int64_t out_features() const { return out_features_; }
  // The kernel in use, for logs: "panel:avx2:bf16", "panel:avx512:int8".
  std::string engine_name() const;

 private:
  PackedLinear() = default;

  int64_t in_features_ = 0;
  int64_t out_features_ = 0;
  Options options_;
  std::unique_ptr<GemmEngine> engine_;
};

}  // namespace kvasir::kernels
