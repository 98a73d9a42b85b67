#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/cpu_isa.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/convert.h"
#include "kernels/gemm/gemm_engine.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kScratchAlignment = 64;

int64_t Size(DType dtype) { return static_cast<int64_t>(DTypeSize(dtype)); }

absl::StatusOr<std::unique_ptr<GemmEngine>> CreateEngine(const WeightSource& source,
                                                         const PackedLinear::Options& options,
                                                         HostArena& memory) {
  if (options.input == DType::kBFloat16 && OneDnnHasMatrixUnits()) {
    auto engine = CreateOneDnnGemm(source, options, memory);
    if (!absl::IsUnimplemented(engine.status())) return engine;
  }
  return CreatePanelGemm(source, options, ChosenCpuIsa(), memory);
}

}  // namespace

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
  HostArena memory(0);
  return Create(parts, options, memory);
}

absl::StatusOr<PackedLinear> PackedLinear::Create(std::span<const Part> parts,
                                                  const Options& options, HostArena& memory) {
  KVASIR_ASSIGN_OR_RETURN(const LinearShape shape, CheckLinearParts(parts, options));
  for (const Part& part : parts) {
    KVASIR_RETURN_IF_ERROR(RequireHostMemory("gemm", {part.weight, part.bias}));
  }
  PackedLinear linear;
  linear.in_features_ = shape.k;
  linear.out_features_ = shape.n;
  linear.options_ = options;
  const WeightSource source(parts, shape.n, shape.k);
  KVASIR_ASSIGN_OR_RETURN(linear.engine_, CreateEngine(source, options, memory));
  return linear;
}

int64_t PackedLinear::ScratchBytes(int num_threads) const {
  return engine_->ScratchBytes(num_threads);
}

absl::Status PackedLinear::Run(const TensorView& x, const TensorView& y,
                               std::span<std::byte> scratch, Executor& executor) {
  ShapeCheck check("gemm");
  check.Match("x", x, {"rows", in_features_}, options_.input)
      .Match("y", y, {"rows", out_features_}, options_.output);
  const int64_t scratch_bytes = ScratchBytes(executor.num_threads());
  check.Require(static_cast<int64_t>(scratch.size()) >= scratch_bytes &&
                    reinterpret_cast<uintptr_t>(scratch.data()) % kScratchAlignment == 0,
                "scratch is smaller than ScratchBytes() or not aligned to 64 bytes");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("gemm", {x, y}));
  if (x.dim(0) == 0) return absl::OkStatus();
  return engine_->Run(
      {.x = x.As<std::byte>(), .y = y.As<std::byte>(), .rows = x.dim(0), .scratch = scratch.data()},
      executor);
}

std::string PackedLinear::engine_name() const { return engine_->name(); }

}  // namespace kvasir::kernels
