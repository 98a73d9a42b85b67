#include "kernels/sampling/sampling.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/device_check.h"
#include "kernels/base/scratch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sampling/sampling_row.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kAlignment = 64;
// Below this many logits, waking other threads costs more than it saves.
constexpr int64_t kMinParallelLogits = 16384;

// Takes the arrays of one thread from `pieces`.
SamplingScratch TakeScratch(ScratchPieces& pieces, int64_t vocab) {
  const auto size = static_cast<size_t>(vocab);
  return {.logits = {pieces.Take<float>(vocab), size},
          .values = {pieces.Take<float>(vocab), size},
          .weights = {pieces.Take<uint64_t>(vocab), size},
          .candidates = {pieces.Take<int32_t>(vocab), size}};
}

int64_t ScratchBytesOfThread(int64_t vocab) {
  ScratchPieces pieces(nullptr);
  TakeScratch(pieces, vocab);
  return pieces.bytes();
}

}  // namespace

int64_t SamplingScratchBytes(int64_t vocab, int num_threads) {
  return num_threads * ScratchBytesOfThread(vocab);
}

absl::Status Sample(const SamplingParams& params, Executor& executor) {
  ShapeCheck check("sampling");
  check.Match("logits", params.logits, {"rows", "vocab"}, DType::kFloat32);
  const int64_t rows = params.logits.dim(0);
  const int64_t vocab = params.logits.dim(1);
  const auto num_rows = static_cast<size_t>(rows);
  check.Require(vocab > 0 && vocab <= kMaxVocab, "the vocabulary is empty, or above 2^22")
      .Require(params.options.size() == num_rows && params.tokens.size() == num_rows,
               "options and tokens must have one entry for each row of logits")
      .Require(static_cast<int64_t>(params.scratch.size()) >=
                       SamplingScratchBytes(vocab, executor.num_threads()) &&
                   reinterpret_cast<uintptr_t>(params.scratch.data()) % kAlignment == 0,
               "scratch is smaller than SamplingScratchBytes() or not aligned to 64 bytes");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("sampling", {params.logits}));

  const int64_t bytes_a_thread = ScratchBytesOfThread(vocab);
  const auto sample_row = [&params, vocab, bytes_a_thread](int64_t row, int thread) {
    const auto r = static_cast<size_t>(row);
    ScratchPieces pieces(params.scratch.data() + thread * bytes_a_thread);
    const std::span<const float> logits(params.logits.As<float>() + row * vocab,
                                        static_cast<size_t>(vocab));
    params.tokens[r] = SampleRow(logits, params.options[r], TakeScratch(pieces, vocab));
  };
  if (executor.num_threads() > 1 && rows > 1 && rows * vocab >= kMinParallelLogits) {
    executor.ParallelFor(rows, sample_row);
  } else {
    for (int64_t row = 0; row < rows; ++row) sample_row(row, 0);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
