#include "kernels/dense/gemm.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/convert.h"
#include "kernels/dense/device_check.h"
#include "kernels/dense/gemm_engine.h"

namespace kvasir::kernels {
namespace {

// Below this, waking other threads costs more than they save (some 20 us of one core).
constexpr double kMinParallelFlops = 8e6;
constexpr int64_t kSliceBytes = int64_t{2} << 20;
// oneDNN packs columns in blocks of 64.
constexpr int64_t kSliceAlignment = 64;
constexpr int64_t kScratchAlignment = 64;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t Size(DType dtype) { return static_cast<int64_t>(DTypeSize(dtype)); }

absl::StatusOr<std::unique_ptr<GemmEngine>> CreateEngine(const WeightSource& source,
                                                         const PackedLinear::Options& options) {
  auto engine = CreateOneDnnGemm(source, options.input, options.output);
  if (absl::IsUnimplemented(engine.status()) && options.input != DType::kFloat32) {
    engine = CreateOneDnnGemm(source, DType::kFloat32, DType::kFloat32);
  }
  if (absl::IsUnimplemented(engine.status())) {
    engine = CreatePanelGemm(
        source, ChosenCpuIsa() >= CpuIsa::kAvx2 ? PanelIsa::kAvx2 : PanelIsa::kPortable);
  }
  return engine;
}

// Where the parts of one thread's scratch lie: [engine][x of a tile][y of a tile].
struct ScratchLayout {
  int64_t x_offset;
  int64_t y_offset;
  int64_t bytes;
};

ScratchLayout LayOutScratch(const GemmEngine& engine, int64_t k, const PackedLinear::Options& o) {
  const int64_t rows = GemmEngine::kMaxTileRows;
  const int64_t x_bytes = engine.input() == o.input ? 0 : rows * k * Size(engine.input());
  const bool writes_y = engine.output() == o.output && engine.slices().count() == 1;
  const int64_t y_bytes = writes_y ? 0 : rows * engine.slices().width * Size(engine.output());
  ScratchLayout layout;
  layout.x_offset = RoundUp(engine.scratch_bytes(), kScratchAlignment);
  layout.y_offset = layout.x_offset + RoundUp(x_bytes, kScratchAlignment);
  layout.bytes = layout.y_offset + RoundUp(y_bytes, kScratchAlignment);
  return layout;
}

// One Run: everything that a tile needs, so that the closure given to the executor is one pointer.
struct Job {
  GemmEngine& engine;
  const PackedLinear::Options& options;
  const std::byte* x;
  std::byte* y;
  int64_t m;
  int64_t k;
  int64_t tile_rows;
  std::byte* scratch;
  ScratchLayout layout;
  std::atomic<bool> failed = false;
  absl::Status status = absl::OkStatus();  // written by the one tile that set `failed`

  int64_t tiles_per_slice() const { return (m + tile_rows - 1) / tile_rows; }
};

// Copies a tile from the engine's contiguous output to its columns of y.
void ScatterTile(const Job& job, const std::byte* tile_y, int64_t row, int64_t rows,
                 int64_t slice) {
  const GemmSlices& slices = job.engine.slices();
  const int64_t width = slices.width_of(slice);
  for (int64_t r = 0; r < rows; ++r) {
    const std::byte* from = tile_y + r * width * Size(job.engine.output());
    std::byte* to = job.y + ((row + r) * slices.n + slices.begin(slice)) * Size(job.options.output);
    ConvertElements(from, job.engine.output(), to, job.options.output, width);
  }
}

void RunTile(Job& job, int64_t index, int thread) {
  const GemmSlices& slices = job.engine.slices();
  // Tiles of one slice come one after another, so that its weights stay in the thread's cache.
  const int64_t slice = index / job.tiles_per_slice();
  const int64_t row = index % job.tiles_per_slice() * job.tile_rows;
  const int64_t rows = std::min(job.tile_rows, job.m - row);
  std::byte* scratch = job.scratch + thread * job.layout.bytes;

  const std::byte* x = job.x + row * job.k * Size(job.options.input);
  if (job.engine.input() != job.options.input) {
    std::byte* converted = scratch + job.layout.x_offset;
    ConvertElements(x, job.options.input, converted, job.engine.input(), rows * job.k);
    x = converted;
  }
  const bool direct =
      job.engine.output() == job.options.output && (slices.count() == 1 || job.m == 1);
  std::byte* y = direct ? job.y + (row * slices.n + slices.begin(slice)) * Size(job.options.output)
                        : scratch + job.layout.y_offset;
  absl::Status status = job.engine.RunTile(
      {.slice = slice, .rows = rows, .x = x, .y = y, .thread = thread, .scratch = scratch});
  if (!status.ok()) {
    if (!job.failed.exchange(true)) job.status = std::move(status);
    return;
  }
  if (!direct) ScatterTile(job, y, row, rows, slice);
}

}  // namespace

GemmSlices ChooseGemmSlices(int64_t n, int64_t k, DType dtype) {
  const int64_t bytes = n * k * Size(dtype);
  const int64_t count = std::max<int64_t>(1, (bytes + kSliceBytes - 1) / kSliceBytes);
  return {.n = n, .width = std::min(n, RoundUp((n + count - 1) / count, kSliceAlignment))};
}

void WeightSource::ReadRows(int64_t begin, int64_t count, DType dtype, std::byte* out) const {
  int64_t part_begin = 0;
  for (const PackedLinear::Part& part : parts_) {
    const int64_t first = std::max(begin, part_begin);
    const int64_t last = std::min(begin + count, part_begin + part.weight.dim(0));
    if (first < last) {
      const std::byte* source =
          part.weight.As<std::byte>() + (first - part_begin) * k_ * Size(part.weight.dtype());
      ConvertElements(source, part.weight.dtype(), out + (first - begin) * k_ * Size(dtype), dtype,
                      (last - first) * k_);
    }
    part_begin += part.weight.dim(0);
  }
}

bool WeightSource::has_bias() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const PackedLinear::Part& part) { return !part.bias.empty(); });
}

void WeightSource::ReadBias(float* out) const {
  for (const PackedLinear::Part& part : parts_) {
    const int64_t n = part.weight.dim(0);
    if (part.bias.empty()) {
      std::fill_n(out, n, 0.0f);
    } else {
      ConvertElements(part.bias.data(), part.bias.dtype(), out, DType::kFloat32, n);
    }
    out += n;
  }
}

PackedLinear::PackedLinear(PackedLinear&&) noexcept = default;
PackedLinear& PackedLinear::operator=(PackedLinear&&) noexcept = default;
PackedLinear::~PackedLinear() = default;

absl::StatusOr<LinearShape> CheckLinearParts(std::span<const PackedLinear::Part> parts,
                                             const PackedLinear::Options& options) {
  ShapeCheck check("gemm");
  check.Require(!parts.empty(), "no weights were given");
  check.Require(IsFloat32OrBFloat16(options.input) && IsFloat32OrBFloat16(options.output),
                "input and output must be float32 or bfloat16");
  check.Require(options.output == DType::kFloat32 || options.output == options.input,
                "a bfloat16 output needs a bfloat16 input");
  int64_t n = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string rows = absl::StrCat("rows", i);
    check.Match("weight", parts[i].weight, {rows, "in_features"});
    check.Require(IsFloat32OrBFloat16(parts[i].weight.dtype()),
                  "weights must be float32 or bfloat16");
    if (!parts[i].bias.empty()) {
      check.Match("bias", parts[i].bias, {rows});
      check.Require(IsFloat32OrBFloat16(parts[i].bias.dtype()),
                    "biases must be float32 or bfloat16");
    }
    check.Require(parts[i].weight.num_elements() > 0, "an empty weight");
    KVASIR_RETURN_IF_ERROR(check.status());
    n += parts[i].weight.dim(0);
  }
  KVASIR_RETURN_IF_ERROR(check.status());
  return LinearShape{.n = n, .k = check.dim("in_features")};
}

absl::StatusOr<PackedLinear> PackedLinear::Create(std::span<const Part> parts,
                                                  const Options& options) {
  KVASIR_ASSIGN_OR_RETURN(const LinearShape shape, CheckLinearParts(parts, options));
  for (const Part& part : parts) {
    KVASIR_RETURN_IF_ERROR(RequireHostMemory("gemm", {part.weight, part.bias}));
  }
  PackedLinear linear;
  linear.in_features_ = shape.k;
  linear.out_features_ = shape.n;
  linear.options_ = options;
  const WeightSource source(parts, shape.n, shape.k);
  KVASIR_ASSIGN_OR_RETURN(linear.engine_, CreateEngine(source, options));
  return linear;
}

int64_t PackedLinear::ScratchBytes(int num_threads) const {
  return num_threads * LayOutScratch(*engine_, in_features_, options_).bytes;
}

absl::Status PackedLinear::Run(const TensorView& x, const TensorView& y,
                               std::span<std::byte> scratch, Executor& executor) {
  const int num_threads = executor.num_threads();
  ShapeCheck check("gemm");
  check.Match("x", x, {"rows", in_features_}, options_.input)
      .Match("y", y, {"rows", out_features_}, options_.output);
  const int64_t scratch_bytes = ScratchBytes(num_threads);
  check.Require(static_cast<int64_t>(scratch.size()) >= scratch_bytes &&
                    reinterpret_cast<uintptr_t>(scratch.data()) % kScratchAlignment == 0,
                "scratch is smaller than ScratchBytes() or not aligned to 64 bytes");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("gemm", {x, y}));
  const int64_t m = x.dim(0);
  if (m == 0) return absl::OkStatus();

  const int64_t slices = engine_->slices().count();
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(in_features_ * out_features_);
  const bool parallel = num_threads > 1 && (slices > 1 || flops >= kMinParallelFlops);
  // Rows of a tile: at least 16, for the kernel's sake, and all threads' share of small batches.
  const int64_t share = parallel ? RoundUp((m + num_threads - 1) / num_threads, 16) : m;
  Job job{.engine = *engine_,
          .options = options_,
          .x = x.As<std::byte>(),
          .y = y.As<std::byte>(),
          .m = m,
          .k = in_features_,
          .tile_rows = std::min(share, GemmEngine::kMaxTileRows),
          .scratch = scratch.data(),
          .layout = LayOutScratch(*engine_, in_features_, options_)};
  KVASIR_RETURN_IF_ERROR(engine_->Prepare(num_threads));
  const int64_t num_tiles = slices * job.tiles_per_slice();
  if (parallel && num_tiles > 1) {
    executor.ParallelFor(num_tiles, [&job](int64_t i, int thread) { RunTile(job, i, thread); });
  } else {
    for (int64_t i = 0; i < num_tiles; ++i) RunTile(job, i, 0);
  }
  return job.status;
}

std::string PackedLinear::engine_name() const { return engine_->name(); }

}  // namespace kvasir::kernels
