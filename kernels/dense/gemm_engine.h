// Internal to gemm: the packed weights of one PackedLinear together with the machine kernel that
// multiplies by them. Columns are cut into slices that are packed one by one, so that a product
// with few rows can still be spread over threads; a tile is some rows times one slice.
//
// The weights reach an engine through WeightSource, which hands out rows in the dtype asked for
// whatever the checkpoint holds. Implementations: gemm_onednn.cc, gemm_cpu.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/dtype.h"
#include "kernels/dense/gemm.h"

namespace kvasir::kernels {

// How [0, n) columns are cut: all slices are `width` wide except a narrower last one.
struct GemmSlices {
  int64_t n = 0;
  int64_t width = 0;

  int64_t count() const { return (n + width - 1) / width; }
  int64_t begin(int64_t slice) const { return slice * width; }
  int64_t width_of(int64_t slice) const { return slice + 1 < count() ? width : n - slice * width; }
};

// The stacked parts of a PackedLinear, read by row. Borrows them.
class WeightSource {
 public:
  WeightSource(std::span<const PackedLinear::Part> parts, int64_t n, int64_t k)
      : parts_(parts), n_(n), k_(k) {}

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // Writes rows [begin, begin + count) to out[count, k], rounded to `dtype` (float32, bfloat16).
  void ReadRows(int64_t begin, int64_t count, DType dtype, std::byte* out) const;
  bool has_bias() const;
  // Writes n float32 values, zeros where a part has no bias.
  void ReadBias(float* out) const;

 private:
  std::span<const PackedLinear::Part> parts_;
  int64_t n_;
  int64_t k_;
};

struct LinearShape {
  int64_t n = 0;
  int64_t k = 0;
};

// INVALID_ARGUMENT unless the parts can be stacked, in dtypes that `options` go with. For every
// form of a linear layer, wherever the parts lie.
absl::StatusOr<LinearShape> CheckLinearParts(std::span<const PackedLinear::Part> parts,
                                             const PackedLinear::Options& options);

struct GemmTile {
  int64_t slice = 0;
  int64_t rows = 0;              // 1 .. GemmEngine::kMaxTileRows
  const std::byte* x = nullptr;  // [rows, k] input()
  std::byte* y = nullptr;        // [rows, width of the slice] output(), contiguous
  int thread = 0;                // no two concurrent tiles share it
  std::byte* scratch = nullptr;  // scratch_bytes(), 64-byte aligned
};

class GemmEngine {
 public:
  static constexpr int64_t kMaxTileRows = 64;

  virtual ~GemmEngine() = default;
  virtual const GemmSlices& slices() const = 0;
  virtual DType input() const = 0;
  virtual DType output() const = 0;
  virtual std::string name() const = 0;
  // Per thread.
  virtual int64_t scratch_bytes() const = 0;
  // Called before tiles of `num_threads` threads, from one thread.
  virtual absl::Status Prepare(int num_threads) = 0;
  virtual absl::Status RunTile(const GemmTile& tile) = 0;
};

// A brgemm of oneDNN for these dtypes, or UNIMPLEMENTED where this machine has none: other kernels
// of oneDNN sum in an order that depends on the number of rows.
absl::StatusOr<std::unique_ptr<GemmEngine>> CreateOneDnnGemm(const WeightSource& source,
                                                             DType input, DType output);

// float32 only. kPortable is the plain reference.
enum class PanelIsa { kPortable, kAvx2 };
absl::StatusOr<std::unique_ptr<GemmEngine>> CreatePanelGemm(const WeightSource& source,
                                                            PanelIsa isa);

// Slices of about 2 MiB of packed weights: the L2 cache of a core, and enough work for a thread.
GemmSlices ChooseGemmSlices(int64_t n, int64_t k, DType dtype);

}  // namespace kvasir::kernels
