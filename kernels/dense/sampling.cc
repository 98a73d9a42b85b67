#include "kernels/dense/sampling.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/device_check.h"
#include "kernels/dense/sampling_row.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kAlignment = 64;
// Below this many logits, waking other threads costs more than it saves.
constexpr int64_t kMinParallelLogits = 16384;

// Bytes of one array of [vocab] in a thread's scratch; floats and ids are of one size.
int64_t ArrayBytes(int64_t vocab) {
  static_assert(sizeof(float) == sizeof(int32_t));
  const auto bytes = vocab * static_cast<int64_t>(sizeof(float));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

SamplingScratch ScratchOfThread(std::byte* scratch, int64_t vocab, int thread) {
  const int64_t array = ArrayBytes(vocab);
  std::byte* base = scratch + thread * 3 * array;
  const auto size = static_cast<size_t>(vocab);
  return {.logits = {reinterpret_cast<float*>(base), size},
          .weights = {reinterpret_cast<float*>(base + array), size},
          .candidates = {reinterpret_cast<int32_t*>(base + 2 * array), size}};
}

}  // namespace

int64_t SamplingScratchBytes(int64_t vocab, int num_threads) {
  return num_threads * 3 * ArrayBytes(vocab);
}

absl::Status Sample(const SamplingParams& params, Executor& executor) {
  ShapeCheck check("sampling");
  check.Match("logits", params.logits, {"rows", "vocab"}, DType::kFloat32);
  const int64_t rows = params.logits.dim(0);
  const int64_t vocab = params.logits.dim(1);
  const auto num_rows = static_cast<size_t>(rows);
  check.Require(vocab > 0, "the vocabulary is empty")
      .Require(params.options.size() == num_rows && params.tokens.size() == num_rows,
               "options and tokens must have one entry for each row of logits")
      .Require(static_cast<int64_t>(params.scratch.size()) >=
                       SamplingScratchBytes(vocab, executor.num_threads()) &&
                   reinterpret_cast<uintptr_t>(params.scratch.data()) % kAlignment == 0,
               "scratch is smaller than SamplingScratchBytes() or not aligned to 64 bytes");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("sampling", {params.logits}));

  const auto sample_row = [&params, vocab](int64_t row, int thread) {
    const auto r = static_cast<size_t>(row);
    const std::span<const float> logits(params.logits.As<float>() + row * vocab,
                                        static_cast<size_t>(vocab));
    params.tokens[r] =
        SampleRow(logits, params.options[r], ScratchOfThread(params.scratch.data(), vocab, thread));
  };
  if (executor.num_threads() > 1 && rows > 1 && rows * vocab >= kMinParallelLogits) {
    executor.ParallelFor(rows, sample_row);
  } else {
    for (int64_t row = 0; row < rows; ++row) sample_row(row, 0);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
