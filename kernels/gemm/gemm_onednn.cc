// The oneDNN engine. It uses the inner product primitive with one OpenMP thread, because then the
// brgemm kernels sum over K in an order that depends on K alone (in 2.6.3: one chain of FMAs up to
// K = 1024, then chunks of at most 1024), never on the number of rows. With more threads oneDNN
// splits K between them for some (rows, K, N), and rows change with the batch around them.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <omp.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "oneapi/dnnl/dnnl.hpp"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/gemm_engine.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxTileRows = 64;
// A primitive is compiled for one number of rows; other counts are composed of these. Batches of up
// to 16 rows, whose time is that of reading the weights, read them once.
constexpr std::array<int64_t, 19> kRowCounts = {64, 48, 32, 16, 15, 14, 13, 12, 11, 10,
                                                9,  8,  7,  6,  5,  4,  3,  2,  1};
static_assert(kRowCounts.front() == kMaxTileRows && kRowCounts.back() == 1);

constexpr int64_t kAlignment = 64;  // of memory; and oneDNN packs columns in blocks of 64
constexpr int64_t kSliceBytes = int64_t{2} << 20;

int64_t RoundUp(int64_t value, int64_t multiple = kAlignment) {
  return (value + multiple - 1) / multiple * multiple;
}

// Columns are cut into slices that are packed one by one, so that a product with few rows can still
// be spread over threads: all are `width` wide except a narrower last one.
struct Slices {
  int64_t n = 0;
  int64_t width = 0;

  int64_t count() const { return (n + width - 1) / width; }
  int64_t begin(int64_t slice) const { return slice * width; }
  int64_t width_of(int64_t slice) const { return slice + 1 < count() ? width : n - slice * width; }
};

// Slices of about 2 MiB of packed weights: the L2 cache of a core, and enough work for a thread.
Slices ChooseSlices(int64_t n, int64_t k, DType dtype) {
  const int64_t bytes = n * k * static_cast<int64_t>(DTypeSize(dtype));
  const int64_t count = std::max<int64_t>(1, (bytes + kSliceBytes - 1) / kSliceBytes);
  return {.n = n, .width = std::min(n, RoundUp((n + count - 1) / count))};
}

// Some rows times one slice.
struct Tile {
  int64_t slice = 0;
  int64_t rows = 0;              // 1 .. kMaxTileRows
  const std::byte* x = nullptr;  // [rows, k]
  std::byte* y = nullptr;        // [rows, width of the slice], contiguous
  int thread = 0;                // no two concurrent tiles share it
  std::byte* scratch = nullptr;  // of oneDNN
};

dnnl::memory::data_type DnnlType(DType dtype) {
  return dtype == DType::kBFloat16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// While alive, this thread's OpenMP regions, and so oneDNN, use one thread.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : saved_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOpenMpThread() { omp_set_num_threads(saved_); }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  int saved_;
};

// The primitives for one width of slice.
struct Width {
  dnnl::memory::desc packed;  // [width, K] in oneDNN's blocked layout
  std::array<dnnl::inner_product_forward::primitive_desc, kRowCounts.size()> descs;
  std::array<dnnl::inner_product_forward, kRowCounts.size()> primitives;
};

struct Shape {
  int64_t width;
  int64_t k;
  DType input;
  DType output;
  bool has_bias;
};

absl::Status CreateWidth(const dnnl::engine& engine, const Shape& shape, Width& width) {
  using dnnl::memory;
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_fpmath_mode(dnnl::fpmath_mode::strict);
  memory::desc weights({shape.width, shape.k}, DnnlType(shape.input), memory::format_tag::any);
  const memory::desc bias({shape.width}, memory::data_type::f32, memory::format_tag::a);
  for (size_t i = 0; i < kRowCounts.size(); ++i) {
    const memory::desc x({kRowCounts[i], shape.k}, DnnlType(shape.input), memory::format_tag::ab);
    const memory::desc y({kRowCounts[i], shape.width}, DnnlType(shape.output),
                         memory::format_tag::ab);
    constexpr auto kForward = dnnl::prop_kind::forward_inference;
    const auto desc = shape.has_bias
                          ? dnnl::inner_product_forward::desc(kForward, x, weights, bias, y)
                          : dnnl::inner_product_forward::desc(kForward, x, weights, y);
    width.descs[i] = dnnl::inner_product_forward::primitive_desc(desc, attr, engine);
    if (!absl::StartsWith(width.descs[i].impl_info_str(), "brgemm")) {
      return absl::UnimplementedError(absl::StrCat(
          "oneDNN has no brgemm for this shape here, only ", width.descs[i].impl_info_str()));
    }
    width.primitives[i] = dnnl::inner_product_forward(width.descs[i]);
    // The tallest tile chooses the layout, the others take it as it is.
    weights = width.descs[i].weights_desc();
  }
  width.packed = weights;
  return absl::OkStatus();
}

absl::Status ToStatus(const dnnl::error& error) {
  if (error.status == dnnl_unimplemented) {
    return absl::UnimplementedError(absl::StrCat("oneDNN: ", error.what()));
  }
  return absl::InternalError(
      absl::StrCat("gemm: oneDNN: ", error.what(), ", status ", static_cast<int>(error.status)));
}

class OneDnnGemm : public GemmEngine {
 public:
  OneDnnGemm(const WeightSource& source, const PackedLinear::Options& options)
      : k_(source.k()),
        slices_(ChooseSlices(source.n(), source.k(), options.input)),
        input_(options.input),
        output_(options.output),
        engine_(dnnl::engine::kind::cpu, 0) {}

  absl::Status Initialize(const WeightSource& source, HostArena& memory) {
    Shape shape{.width = slices_.width,
                .k = k_,
                .input = input_,
                .output = output_,
                .has_bias = source.has_bias()};
    widths_.resize(1);
    KVASIR_RETURN_IF_ERROR(CreateWidth(engine_, shape, widths_[0]));
    if (slices_.n % slices_.width != 0) {
      shape.width = slices_.n % slices_.width;
      widths_.resize(2);
      KVASIR_RETURN_IF_ERROR(CreateWidth(engine_, shape, widths_[1]));
    }
    for (const Width& width : widths_) {
      for (const auto& desc : width.descs) {
        scratch_bytes_ =
            std::max(scratch_bytes_, static_cast<int64_t>(desc.scratchpad_desc().get_size()));
      }
    }
    KVASIR_RETURN_IF_ERROR(PackWeights(source, memory));
    return source.has_bias() ? CopyBias(source) : absl::OkStatus();
  }

  std::string name() const override { return widths_[0].descs.front().impl_info_str(); }
  int64_t ScratchBytes(int num_threads) const override {
    return num_threads * (y_offset() + tile_y_bytes());
  }

  absl::Status Run(const GemmRun& run, Executor& executor) override {
    const int num_threads = executor.num_threads();
    KVASIR_RETURN_IF_ERROR(Prepare(num_threads));
    const double flops = 2.0 * static_cast<double>(run.rows) * static_cast<double>(k_ * slices_.n);
    const bool parallel = num_threads > 1 && (slices_.count() > 1 || flops >= kMinParallelFlops);
    // Rows of a tile: at least 16, for the kernel's sake, and all threads' share of small batches.
    const int64_t share =
        parallel ? RoundUp((run.rows + num_threads - 1) / num_threads, 16) : run.rows;
    Job job{.run = run, .tile_rows = std::min(share, kMaxTileRows)};
    const int64_t num_tiles = slices_.count() * job.tiles_per_slice();
    SerialExecutor serial;
    (parallel ? executor : serial).ParallelFor(num_tiles, [&](int64_t i, int thread) {
      RunItem(job, i, thread);
    });
    return job.status;
  }

 private:
  struct Job {
    const GemmRun& run;
    int64_t tile_rows;
    std::atomic<bool> failed = false;
    absl::Status status = absl::OkStatus();  // written by the one tile that set `failed`

    int64_t tiles_per_slice() const { return (run.rows + tile_rows - 1) / tile_rows; }
  };

  int64_t x_row() const { return k_ * static_cast<int64_t>(DTypeSize(input_)); }
  int64_t y_element() const { return static_cast<int64_t>(DTypeSize(output_)); }
  // A thread's scratch is [oneDNN's][y of a tile, where there are several slices].
  int64_t y_offset() const { return RoundUp(scratch_bytes_); }
  int64_t tile_y_bytes() const {
    return slices_.count() == 1 ? 0 : RoundUp(kMaxTileRows * slices_.width * y_element());
  }

  void RunItem(Job& job, int64_t index, int thread) {
    // Tiles of one slice come one after another, so that its weights stay in the thread's cache.
    const int64_t slice = index / job.tiles_per_slice();
    const int64_t row = index % job.tiles_per_slice() * job.tile_rows;
    const int64_t rows = std::min(job.tile_rows, job.run.rows - row);
    std::byte* scratch = job.run.scratch + thread * (y_offset() + tile_y_bytes());
    const bool direct = slices_.count() == 1 || job.run.rows == 1;
    std::byte* target = job.run.y + (row * slices_.n + slices_.begin(slice)) * y_element();
    std::byte* y = direct ? target : scratch + y_offset();
    absl::Status status = RunTile({.slice = slice,
                                   .rows = rows,
                                   .x = job.run.x + row * x_row(),
                                   .y = y,
                                   .thread = thread,
                                   .scratch = scratch});
    if (!status.ok()) {
      if (!job.failed.exchange(true)) job.status = std::move(status);
      return;
    }
    const int64_t bytes = slices_.width_of(slice) * y_element();
    for (int64_t r = 0; !direct && r < rows; ++r) {
      std::memcpy(target + r * slices_.n * y_element(), y + r * bytes, static_cast<size_t>(bytes));
    }
  }

  absl::Status Prepare(int num_threads) {
    try {
      while (threads_.size() < static_cast<size_t>(num_threads)) {
        Thread& thread = threads_.emplace_back(dnnl::stream(engine_));
        thread.arguments.resize(widths_.size());
        for (size_t w = 0; w < widths_.size(); ++w) CreateArguments(w, thread.arguments[w]);
      }
    } catch (const dnnl::error& error) {
      return ToStatus(error);
    }
    return absl::OkStatus();
  }

  absl::Status RunTile(const Tile& tile) {
    const OneOpenMpThread one_thread;
    const int64_t y_row = slices_.width_of(tile.slice) * y_element();
    Tile rest = tile;
    for (size_t i = 0; i < kRowCounts.size() && rest.rows > 0; ++i) {
      while (rest.rows >= kRowCounts[i]) {
        KVASIR_RETURN_IF_ERROR(RunRows(i, rest));
        rest.rows -= kRowCounts[i];
        rest.x += kRowCounts[i] * x_row();
        rest.y += kRowCounts[i] * y_row;
      }
    }
    return absl::OkStatus();
  }

  // Memory objects cost an allocation each, so every thread keeps its own and moves their pointers.
  struct Arguments {
    dnnl::memory x;
    dnnl::memory y;
    dnnl::memory scratchpad;
  };
  using ArgumentsOfWidth = std::array<Arguments, kRowCounts.size()>;
  struct Thread {
    explicit Thread(dnnl::stream s) : stream(std::move(s)) {}
    dnnl::stream stream;
    std::vector<ArgumentsOfWidth> arguments;  // by index in widths_
  };

  size_t width_index(int64_t slice) const {
    return slice + 1 == slices_.count() ? widths_.size() - 1 : 0;
  }

  void CreateArguments(size_t w, ArgumentsOfWidth& arguments) {
    for (size_t i = 0; i < kRowCounts.size(); ++i) {
      const auto& desc = widths_[w].descs[i];
      arguments[i].x = dnnl::memory(desc.src_desc(), engine_, nullptr);
      arguments[i].y = dnnl::memory(desc.dst_desc(), engine_, nullptr);
      arguments[i].scratchpad = dnnl::memory(desc.scratchpad_desc(), engine_, nullptr);
    }
  }

  dnnl::memory::desc PlainWeights(int64_t slice) const {
    return {{slices_.width_of(slice), k_}, DnnlType(input_), dnnl::memory::format_tag::ab};
  }

  absl::Status PackWeights(const WeightSource& source, HostArena& memory) {
    const int64_t stride = RoundUp(static_cast<int64_t>(widths_[0].packed.get_size()));
    KVASIR_ASSIGN_OR_RETURN(packed_, memory.Take(stride * slices_.count()));
    KVASIR_ASSIGN_OR_RETURN(const HostBuffer rows,
                            HostBuffer::Allocate(static_cast<int64_t>(PlainWeights(0).get_size())));
    dnnl::stream stream(engine_);
    for (int64_t s = 0; s < slices_.count(); ++s) {
      source.ReadRows(slices_.begin(s), slices_.width_of(s), input_, rows.data());
      dnnl::memory from(PlainWeights(s), engine_, rows.data());
      dnnl::memory to(widths_[width_index(s)].packed, engine_, packed_.data + s * stride);
      dnnl::reorder(from, to).execute(stream, from, to);
      stream.wait();
      weights_.push_back(std::move(to));
    }
    return absl::OkStatus();
  }

  absl::Status CopyBias(const WeightSource& source) {
    KVASIR_ASSIGN_OR_RETURN(bias_,
                            HostBuffer::Allocate(slices_.n * static_cast<int64_t>(sizeof(float))));
    source.ReadBias(bias_.As<float>());
    for (int64_t s = 0; s < slices_.count(); ++s) {
      const dnnl::memory::desc desc({slices_.width_of(s)}, dnnl::memory::data_type::f32,
                                    dnnl::memory::format_tag::a);
      biases_.emplace_back(desc, engine_, bias_.As<float>() + slices_.begin(s));
    }
    return absl::OkStatus();
  }

  // The first kRowCounts[i] rows of the tile. Through the C interface, since the C++ one takes a
  // hash map, built for each call, and throws.
  absl::Status RunRows(size_t i, const Tile& tile) {
    const size_t w = width_index(tile.slice);
    const auto slice = static_cast<size_t>(tile.slice);
    Thread& thread = threads_[static_cast<size_t>(tile.thread)];
    const Arguments& a = thread.arguments[w][i];
    const dnnl_exec_arg_t arguments[] = {
        {DNNL_ARG_SRC, a.x.get()},
        {DNNL_ARG_WEIGHTS, weights_[slice].get()},
        {DNNL_ARG_DST, a.y.get()},
        {DNNL_ARG_SCRATCHPAD, a.scratchpad.get()},
        {DNNL_ARG_BIAS, biases_.empty() ? nullptr : biases_[slice].get()},
    };
    const int num_arguments = static_cast<int>(std::size(arguments)) - (biases_.empty() ? 1 : 0);
    const bool ok =
        dnnl_memory_set_data_handle(a.x.get(), const_cast<std::byte*>(tile.x)) == dnnl_success &&
        dnnl_memory_set_data_handle(a.y.get(), tile.y) == dnnl_success &&
        dnnl_memory_set_data_handle(a.scratchpad.get(), tile.scratch) == dnnl_success &&
        dnnl_primitive_execute(widths_[w].primitives[i].get(), thread.stream.get(), num_arguments,
                               arguments) == dnnl_success;
    if (ok) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("gemm: oneDNN failed to multiply ", kRowCounts[i],
                                            " rows; ONEDNN_VERBOSE=2 tells more"));
  }

  // Constant after Initialize.
  int64_t k_;
  Slices slices_;
  DType input_;
  DType output_;
  dnnl::engine engine_;
  std::vector<Width> widths_;  // of all slices; where the last one is narrower, it has its own
  int64_t scratch_bytes_ = 0;
  HostArena::Piece packed_;
  HostBuffer bias_;
  std::vector<dnnl::memory> weights_;  // by slice, in packed_
  std::vector<dnnl::memory> biases_;   // by slice, in bias_; empty without a bias
  // Grown by Prepare; each entry is used by the executor's thread of that number.
  std::vector<Thread> threads_;
};

}  // namespace

bool OneDnnHasMatrixUnits() {
  return dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx;
}

absl::StatusOr<std::unique_ptr<GemmEngine>> CreateOneDnnGemm(const WeightSource& source,
                                                             const PackedLinear::Options& options,
                                                             HostArena& memory) {
  const CpuIsa needed = options.input == DType::kBFloat16 ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
  if (options.weights != WeightForm::kAsInput || ChosenCpuIsa() < needed) {
    return absl::UnimplementedError("oneDNN is not used for these weights and instructions");
  }
  // oneDNN's C++ interface throws; no exception leaves this file.
  try {
    const OneOpenMpThread one_thread;
    auto engine = std::make_unique<OneDnnGemm>(source, options);
    KVASIR_RETURN_IF_ERROR(engine->Initialize(source, memory));
    return engine;
  } catch (const dnnl::error& error) {
    return ToStatus(error);
  }
}

}  // namespace kvasir::kernels
