// Sampling of rows of given logits.
#pragma once

#include <gtest/gtest.h>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/sampling/sampling.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {

inline std::vector<SampledToken> SampleRows(const std::vector<std::vector<float>>& rows,
                                            const std::vector<SamplingOptions>& options,
                                            Executor& executor) {
  std::vector<float> logits;
  for (const auto& row : rows) logits.insert(logits.end(), row.begin(), row.end());
  const auto vocab = static_cast<int64_t>(rows[0].size());
  auto scratch = HostBuffer::Allocate(SamplingScratchBytes(vocab, executor.num_threads()));
  KVASIR_CHECK(scratch.ok());
  std::vector<SampledToken> tokens(rows.size());
  const absl::Status status =
      Sample({.logits = TensorView(logits.data(), DType::kFloat32,
                                   {static_cast<int64_t>(rows.size()), vocab}),
              .options = options,
              .tokens = tokens,
              .scratch = {scratch->data(), static_cast<size_t>(scratch->size_bytes())}},
             executor);
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}

inline SampledToken SampleOne(const std::vector<float>& logits, const SamplingOptions& options) {
  SerialExecutor executor;
  return SampleRows({logits}, {options}, executor)[0];
}

}  // namespace kvasir::kernels
