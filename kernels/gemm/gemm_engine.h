// Internal to gemm: the packed weights of one PackedLinear together with the machine kernel that
// multiplies by them. The weights reach an engine through WeightSource, which hands out rows in the
// dtype asked for whatever the checkpoint holds. Implementations: gemm_onednn.cc,
// gemm_panel_engine.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_panel.h"

namespace kvasir::kernels {

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

struct GemmRun {
  const std::byte* x = nullptr;  // [rows, k] of the options' input
  std::byte* y = nullptr;        // [rows, n] of the options' output
  int64_t rows = 0;              // > 0
  std::byte* scratch = nullptr;  // ScratchBytes(executor.num_threads()), aligned to 64 bytes
};

class GemmEngine {
 public:
  // Below this many operations, waking other threads costs more than they save.
  static constexpr double kMinParallelFlops = 2e5;

  virtual ~GemmEngine() = default;
  virtual std::string name() const = 0;
  virtual int64_t ScratchBytes(int num_threads) const = 0;
  virtual absl::Status Run(const GemmRun& run, Executor& executor) = 0;
};

// Whether this machine multiplies blocks of bfloat16 (AMX), which oneDNN makes use of and our own
// kernels do not.
bool OneDnnHasMatrixUnits();

// A brgemm of oneDNN with weights of the input's dtype, or UNIMPLEMENTED where the instruction set
// in use has none: other kernels of oneDNN sum in an order that depends on the number of rows.
absl::StatusOr<std::unique_ptr<GemmEngine>> CreateOneDnnGemm(const WeightSource& source,
                                                             const PackedLinear::Options& options,
                                                             HostArena& memory);

// Our own kernels for `isa` or the next lower one that has any (gemm_panel.h).
absl::StatusOr<std::unique_ptr<GemmEngine>> CreatePanelGemm(const WeightSource& source,
                                                            const PackedLinear::Options& options,
                                                            CpuIsa isa, HostArena& memory);

}  // namespace kvasir::kernels
