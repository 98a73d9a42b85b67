// The panel engine: cuts a product into items for threads and has the kernels of gemm_panel.h
// compute them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/buffer.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gemm_engine.h"
#include "kernels/gemm/gemm_panel.h"
#include "kernels/gemm/gemm_panel_pack.h"

namespace kvasir::kernels {
namespace {

// Most bytes of x as float32, and most rows, that are converted and multiplied together: the last
// cache of a machine has room for them.
constexpr int64_t kMaxXBytes = int64_t{8} << 20;
constexpr int64_t kMaxRows = 512;
// Rows of an item of many rows: x and sums of one block of k lie in a core's own cache.
constexpr int64_t kMaxItemRows = 192;
constexpr int64_t kMaxItemColumns = 256;
// Items of a thread: more of them end together more closely.
constexpr int64_t kItemsPerThread = 8;
// Least weights of an item of few rows: fewer are read before a next item is taken.
constexpr int64_t kMinItemBytes = int64_t{32} << 10;

// Intel's processors read one row's weights at two thirds of their speed by themselves, AMD's at
// nine tenths (decision 0013).
int64_t AheadBytes() {
  constexpr int64_t kAheadOnIntel = 4096;
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0 ? kAheadOnIntel : 0;
#else
  return 0;
#endif
}

PanelFormat FormatOf(const PackedLinear::Options& options, int64_t k, CpuIsa isa) {
  if (options.weights == WeightForm::kInt8) return PanelFormat::kInt8;
  if (options.input == DType::kFloat32) return PanelFormat::kFloat32;
  const bool pairs = isa >= CpuIsa::kAvx512Bf16 && k % 2 == 0;
  return pairs ? PanelFormat::kBFloat16Pairs : PanelFormat::kBFloat16;
}

absl::string_view FormatName(PanelFormat format) {
  switch (format) {
    case PanelFormat::kFloat32:
      return "f32";
    case PanelFormat::kBFloat16:
    case PanelFormat::kBFloat16Pairs:
      return "bf16";
    case PanelFormat::kInt8:
      return "int8";
  }
  return "unknown";
}

struct NamedKernels {
  PanelKernels kernels;
  absl::string_view name;
};

NamedKernels KernelsFor(PanelFormat format, CpuIsa isa) {
#if defined(__x86_64__)
  if (format == PanelFormat::kBFloat16Pairs) {
    return {Avx512Bf16PanelKernels(), CpuIsaName(CpuIsa::kAvx512Bf16)};
  }
  if (isa >= CpuIsa::kAvx512) return {Avx512PanelKernels(), CpuIsaName(CpuIsa::kAvx512)};
  if (isa >= CpuIsa::kAvx2) return {Avx2PanelKernels(), CpuIsaName(CpuIsa::kAvx2)};
#elif defined(__aarch64__)
  if (isa >= CpuIsa::kNeon) return {NeonPanelKernels(), CpuIsaName(CpuIsa::kNeon)};
#endif
  return {PortablePanelKernels(), CpuIsaName(CpuIsa::kPortable)};
}

class PanelGemm : public GemmEngine {
 public:
  PanelGemm(const WeightSource& source, const PackedLinear::Options& options, CpuIsa isa)
      : options_(options),
        format_(FormatOf(options, source.k(), isa)),
        kernels_(KernelsFor(format_, isa)) {
    const int64_t k = NumUnits(format_, source.k());
    // A group of int8 has twice the columns: two blocks should lie in a core's nearest cache.
    const int64_t most = format_ == PanelFormat::kInt8 ? kMaxKBlock / 2 : kMaxKBlock;
    k_block_ = DivideUp(DivideUp(k, DivideUp(k, most)), kScaleGroup) * kScaleGroup;
    weights_ = {.format = format_, .n = source.n(), .inputs = source.k(), .k = k};
  }

  absl::Status Initialize(const WeightSource& source, HostArena& memory) {
    KVASIR_ASSIGN_OR_RETURN(packed_, PackPanels(source, format_, kernels().lanes, memory));
    weights_.data = packed_.data.data;
    weights_.bias = packed_.bias.As<float>();
    return absl::OkStatus();
  }

  std::string name() const override {
    return absl::StrCat("panel:", kernels_.name, ":", FormatName(format_));
  }

  int64_t ScratchBytes(int num_threads) const override {
    return LayOut(nullptr, num_threads).bytes;
  }

  absl::Status Run(const GemmRun& run, Executor& executor) override {
    const int64_t parts = DivideUp(run.rows, max_rows());
    for (int64_t part = 0; part < parts; ++part) {
      RunPart(run, {run.rows * part / parts, run.rows * (part + 1) / parts}, executor);
    }
    return absl::OkStatus();
  }

 private:
  struct Rows {
    int64_t begin;
    int64_t end;
  };
  struct Layout {
    float* x_blocks;
    float* x_scales;
    float* of_threads;
    int64_t floats_per_thread;
    int64_t bytes;
  };

  const PanelKernels& kernels() const { return kernels_.kernels; }
  int64_t panel_columns() const { return 2 * kernels().lanes; }
  int64_t num_panels() const { return DivideUp(weights_.n, panel_columns()); }
  int64_t num_groups() const { return DivideUp(weights_.n, GroupColumns(format_)); }
  int64_t num_k_blocks() const { return DivideUp(weights_.k, k_block_); }

  int64_t max_rows() const {
    const int64_t row_bytes = num_k_blocks() * kMaxKBlock * static_cast<int64_t>(sizeof(float));
    return std::clamp(kMaxXBytes / row_bytes, kMaxFewRows, kMaxRows);
  }

  Layout LayOut(std::byte* scratch, int num_threads) const {
    ScratchPieces pieces(scratch);
    Layout layout;
    layout.x_blocks = pieces.Take<float>(max_rows() * num_k_blocks() * kMaxKBlock);
    layout.x_scales = pieces.Take<float>(max_rows() * num_k_blocks() * kMaxXScales);
    const int64_t panels = kMaxItemColumns / panel_columns();
    layout.floats_per_thread = ManyRowsScratchFloats(
        kernels().lanes, std::min(kMaxItemRows, max_rows()), std::min(panels, num_panels()));
    layout.of_threads = pieces.Take<float>(layout.floats_per_thread * num_threads);
    layout.bytes = pieces.bytes();
    return layout;
  }

  // REQUIRES: no more rows than max_rows().
  void RunPart(const GemmRun& run, const Rows& rows, Executor& executor) {
    const Layout layout = LayOut(run.scratch, executor.num_threads());
    const bool pairs = format_ == PanelFormat::kBFloat16Pairs;
    PanelJob job{.weights = weights_,
                 .x_is_bfloat16 = options_.input == DType::kBFloat16 && !pairs,
                 .y_is_bfloat16 = options_.output == DType::kBFloat16,
                 .rows = rows.end - rows.begin,
                 .x_blocks = layout.x_blocks,
                 .x_scales = layout.x_scales,
                 .k_block = k_block_,
                 .ahead_bytes = ahead_bytes_};
    job.x = run.x + rows.begin * weights_.inputs * static_cast<int64_t>(DTypeSize(options_.input));
    job.y = run.y + rows.begin * weights_.n * static_cast<int64_t>(DTypeSize(options_.output));
    if (job.rows <= kMaxFewRows) {
      RunFewRows(job, executor);
    } else {
      RunManyRows(job, layout, executor);
    }
  }

  bool IsWorthThreads(const PanelJob& job, const Executor& executor) const {
    const auto flops = 2.0 * static_cast<double>(job.rows) * static_cast<double>(weights_.n) *
                       static_cast<double>(weights_.inputs);
    return executor.num_threads() > 1 && flops >= kMinParallelFlops;
  }

  void RunFewRows(const PanelJob& job, Executor& executor) {
    kernels().pack_rows(job, 0, job.rows);
    if (!IsWorthThreads(job, executor)) return kernels().few_rows(job, 0, num_groups());
    const int64_t group_bytes = GroupColumns(format_) * PanelColumnBytes(format_, weights_.k);
    const int64_t item = std::max(DivideUp(kMinItemBytes, group_bytes),
                                  num_groups() / (executor.num_threads() * kItemsPerThread));
    executor.ParallelFor(DivideUp(num_groups(), item), [&](int64_t i, int) {
      kernels().few_rows(job, i * item, std::min(num_groups(), (i + 1) * item));
    });
  }

  void RunManyRows(const PanelJob& job, const Layout& layout, Executor& executor) {
    const bool parallel = IsWorthThreads(job, executor);
    const int64_t threads = parallel ? executor.num_threads() : 1;
    const int64_t row_blocks = DivideUp(job.rows, kMaxItemRows);
    const int64_t panels = std::clamp(num_panels() * row_blocks / (threads * kItemsPerThread),
                                      int64_t{1}, kMaxItemColumns / panel_columns());
    const int64_t panel_blocks = DivideUp(num_panels(), panels);
    const auto pack = [&](int64_t i, int) {
      kernels().pack_rows(job, job.rows * i / threads, job.rows * (i + 1) / threads);
    };
    // Items of the same columns come one after another.
    const auto multiply = [&](int64_t i, int thread) {
      const int64_t row = i % row_blocks, panel = i / row_blocks * panels;
      kernels().many_rows(job,
                          {.row_begin = job.rows * row / row_blocks,
                           .row_end = job.rows * (row + 1) / row_blocks,
                           .panel_begin = panel,
                           .panel_end = std::min(num_panels(), panel + panels)},
                          layout.of_threads + thread * layout.floats_per_thread);
    };
    SerialExecutor serial;
    Executor& chosen = parallel ? executor : serial;
    chosen.ParallelFor(threads, pack);
    chosen.ParallelFor(row_blocks * panel_blocks, multiply);
  }

  // Constant after Initialize.
  const PackedLinear::Options options_;
  const PanelFormat format_;
  const NamedKernels kernels_;
  const int64_t ahead_bytes_ = AheadBytes();
  int64_t k_block_;
  PackedPanels packed_;
  PanelWeights weights_;  // in packed_
};

}  // namespace

absl::StatusOr<std::unique_ptr<GemmEngine>> CreatePanelGemm(const WeightSource& source,
                                                            const PackedLinear::Options& options,
                                                            CpuIsa isa, HostArena& memory) {
  auto engine = std::make_unique<PanelGemm>(source, options, isa);
  KVASIR_RETURN_IF_ERROR(engine->Initialize(source, memory));
  return engine;
}

}  // namespace kvasir::kernels
