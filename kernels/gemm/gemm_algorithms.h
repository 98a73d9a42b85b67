// cuBLASLt, and which of its algorithms multiplies many rows of a linear layer: one whose sums have
// the bits of our kernel for a few rows (gemm_few_rows.h), so that a row's bits do not depend on
// what is computed beside it.
//
// cuBLASLt promises no order of sums, so it is asked for algorithms that do not split K, and each
// is tried: on weights and rows whose sums cancel, so that only errors of rounding are left, which
// change with the order. The number of rows is rounded up to a class, and a class has one
// algorithm. Only gemm_cuda.cc and tests include it, in builds with CUDA.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cublasLt.h>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"
#include "kernels/base/mutex.h"

namespace kvasir::kernels {

struct DestroyLt {
  void operator()(cublasLtContext* handle) const { cublasLtDestroy(handle); }
  void operator()(cublasLtMatmulDescOpaque_t* description) const {
    cublasLtMatmulDescDestroy(description);
  }
  void operator()(cublasLtMatrixLayoutOpaque_t* layout) const {
    cublasLtMatrixLayoutDestroy(layout);
  }
  void operator()(cublasLtMatmulPreferenceOpaque_t* preference) const {
    cublasLtMatmulPreferenceDestroy(preference);
  }
};
using LtDescription = std::unique_ptr<cublasLtMatmulDescOpaque_t, DestroyLt>;
using LtLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, DestroyLt>;

absl::Status CublasStatus(cublasStatus_t status, absl::string_view doing);

// cuBLASLt counts by columns. In its terms weights are [K, N], x is [K, M] and y is [N, M]:
// y = weights^T x + bias. `bias`: [N] of `output` in device memory, or null.
absl::StatusOr<LtDescription> DescribeProduct(const void* bias, DType output);
absl::StatusOr<LtLayout> DescribeMatrix(DType dtype, int64_t rows, int64_t columns);

// A product, and the properties that algorithms for it must have.
struct LtCandidates {
  // kMaySplit: parts of a sum may be computed apart, and added in float32.
  enum class Sums { kWhole, kMaySplit };

  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t weights = nullptr, x = nullptr, y = nullptr;
  uint32_t x_alignment = 16, y_alignment = 16;  // in bytes
  int64_t workspace_bytes = 0;
  Sums sums = Sums::kWhole;
  int most = 1;
};
// Returns algorithms, those first that cuBLASLt expects to be fastest; maybe none.
absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> CandidatesFor(cublasLtHandle_t handle,
                                                                const LtCandidates& asked);

// Rows of x and y must be aligned so.
inline constexpr uint32_t kRowAlignment = 16;

struct ProductShape {
  int64_t n = 0;
  int64_t k = 0;
  DType output = DType::kBFloat16;  // the input is bfloat16
  bool has_bias = false;

  auto operator<=>(const ProductShape&) const = default;
};

struct LinearAlgorithms {
  static constexpr int kClasses = 7;
  static constexpr int64_t kLeastRows = 128;  // of the first class; each has twice as many

  std::array<cublasLtMatmulAlgo_t, kClasses> of_class;
  // For tests. Of each class, the index of the first candidate that had the bits of our kernel,
  // where the fastest has 0; -1: none had.
  std::array<int, kClasses> places = {};
  // Whether all have the bits of our kernel. A class that has no such algorithm takes the nearest
  // class's; without any they are the fastest.
  bool keep_bits = false;

  static int ClassOf(int64_t rows);
  const cublasLtMatmulAlgo_t& For(int64_t rows) const {
    return of_class[static_cast<size_t>(ClassOf(rows))];
  }
};

// cuBLASLt on the current device. Thread-safe.
class CublasLt {
 public:
  // UNAVAILABLE without a usable device.
  static absl::StatusOr<CublasLt> Create();
  cublasLtHandle_t handle() const { return handle_.get(); }

  // Returns the algorithms of a shape that our kernel for a few rows takes (FewRowsFit of one row).
  // The first call for a shape tries candidates, in device memory that it gives back, and waits for
  // the device. The result lives as long as this object. UNIMPLEMENTED: cuBLASLt has none.
  absl::StatusOr<const LinearAlgorithms*> AlgorithmsOf(const ProductShape& shape) const;

 private:
  struct Found {
    Mutex mu;
    std::map<ProductShape, LinearAlgorithms> of_shape GUARDED_BY(mu);
  };
  std::unique_ptr<cublasLtContext, DestroyLt> handle_;
  std::unique_ptr<Found> found_ = std::make_unique<Found>();
};

}  // namespace kvasir::kernels
