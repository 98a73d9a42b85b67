// The oneDNN engine. It uses the inner product primitive with one OpenMP thread, because then the
// brgemm kernels sum over K in an order that depends on K alone (in 2.6.3: one chain of FMAs up to
// K = 1024, then chunks of at most 1024), never on the number of rows. With more threads oneDNN
// splits K between them for some (rows, K, N), and rows change with the batch around them.
#include <algorithm>
#include <array>
#include <iterator>
#include <omp.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "oneapi/dnnl/dnnl.hpp"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/gemm_engine.h"

namespace kvasir::kernels {
namespace {

// A primitive is compiled for one number of rows; other counts are composed of these. Batches of up
// to 16 rows, whose time is that of reading the weights, read them once.
constexpr std::array<int64_t, 19> kRowCounts = {64, 48, 32, 16, 15, 14, 13, 12, 11, 10,
                                                9,  8,  7,  6,  5,  4,  3,  2,  1};
static_assert(kRowCounts.front() == GemmEngine::kMaxTileRows && kRowCounts.back() == 1);

constexpr int64_t kAlignment = 64;

int64_t RoundUp(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

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
  OneDnnGemm(const WeightSource& source, DType input, DType output)
      : k_(source.k()),
        slices_(ChooseGemmSlices(source.n(), source.k(), input)),
        input_(input),
        output_(output),
        engine_(dnnl::engine::kind::cpu, 0) {}

  absl::Status Initialize(const WeightSource& source) {
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
    KVASIR_RETURN_IF_ERROR(PackWeights(source));
    return source.has_bias() ? CopyBias(source) : absl::OkStatus();
  }

  const GemmSlices& slices() const override { return slices_; }
  DType input() const override { return input_; }
  DType output() const override { return output_; }
  std::string name() const override { return widths_[0].descs.front().impl_info_str(); }
  int64_t scratch_bytes() const override { return scratch_bytes_; }

  absl::Status Prepare(int num_threads) override {
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

  absl::Status RunTile(const GemmTile& tile) override {
    const OneOpenMpThread one_thread;
    const int64_t x_row = k_ * static_cast<int64_t>(DTypeSize(input_));
    const int64_t y_row = slices_.width_of(tile.slice) * static_cast<int64_t>(DTypeSize(output_));
    GemmTile rest = tile;
    for (size_t i = 0; i < kRowCounts.size() && rest.rows > 0; ++i) {
      while (rest.rows >= kRowCounts[i]) {
        KVASIR_RETURN_IF_ERROR(RunRows(i, rest));
        rest.rows -= kRowCounts[i];
        rest.x += kRowCounts[i] * x_row;
        rest.y += kRowCounts[i] * y_row;
      }
    }
    return absl::OkStatus();
  }

 private:
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

  absl::Status PackWeights(const WeightSource& source) {
    const int64_t stride = RoundUp(static_cast<int64_t>(widths_[0].packed.get_size()));
    KVASIR_ASSIGN_OR_RETURN(packed_, HostBuffer::Allocate(stride * slices_.count()));
    KVASIR_ASSIGN_OR_RETURN(const HostBuffer rows,
                            HostBuffer::Allocate(static_cast<int64_t>(PlainWeights(0).get_size())));
    dnnl::stream stream(engine_);
    for (int64_t s = 0; s < slices_.count(); ++s) {
      source.ReadRows(slices_.begin(s), slices_.width_of(s), input_, rows.data());
      dnnl::memory from(PlainWeights(s), engine_, rows.data());
      dnnl::memory to(widths_[width_index(s)].packed, engine_, packed_.data() + s * stride);
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
  absl::Status RunRows(size_t i, const GemmTile& tile) {
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
  GemmSlices slices_;
  DType input_;
  DType output_;
  dnnl::engine engine_;
  std::vector<Width> widths_;  // of all slices; where the last one is narrower, it has its own
  int64_t scratch_bytes_ = 0;
  HostBuffer packed_;
  HostBuffer bias_;
  std::vector<dnnl::memory> weights_;  // by slice, in packed_
  std::vector<dnnl::memory> biases_;   // by slice, in bias_; empty without a bias
  // Grown by Prepare; each entry is used by the executor's thread of that number.
  std::vector<Thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GemmEngine>> CreateOneDnnGemm(const WeightSource& source,
                                                             DType input, DType output) {
  // oneDNN's C++ interface throws; no exception leaves this file.
  try {
    const OneOpenMpThread one_thread;
    auto engine = std::make_unique<OneDnnGemm>(source, input, output);
    KVASIR_RETURN_IF_ERROR(engine->Initialize(source));
    return engine;
  } catch (const dnnl::error& error) {
    return ToStatus(error);
  }
}

}  // namespace kvasir::kernels
