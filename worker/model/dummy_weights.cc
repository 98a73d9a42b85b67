#include "worker/model/dummy_weights.h"

#include <cmath>
#include <xxhash.h>

#include "absl/strings/match.h"

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/weights_layout.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::TensorView;

constexpr double kBiasDeviation = 0.02;

struct Distribution {
  double mean = 0;
  double deviation = 0;
};

Distribution DistributionOf(const WeightPart& part) {
  if (absl::EndsWith(part.name, "norm.weight")) return {.mean = 1};
  if (absl::EndsWith(part.name, ".bias")) return {.deviation = kBiasDeviation};
  if (absl::EndsWith(part.name, "embed_tokens.weight")) return {.deviation = 1};
  return {.deviation = 1 / std::sqrt(static_cast<double>(part.shape[1]))};
}

absl::Status AllocateTarget(Tensor& target, DType dtype, Backend& backend) {
  const TensorView shape = target.view;
  KVASIR_ASSIGN_OR_RETURN(target.memory, backend.Allocate(shape.num_elements() *
                                                          static_cast<int64_t>(DTypeSize(dtype))));
  std::byte* const data = target.memory.data();
  const kernels::Device device = target.memory.device();
  target.view = shape.rank() == 1 ? TensorView(data, dtype, {shape.dim(0)}, device)
                                  : TensorView(data, dtype, {shape.dim(0), shape.dim(1)}, device);
  return absl::OkStatus();
}

// Returns the part's rows of its target.
TensorView RowsOf(const WeightPart& part) {
  const TensorView& target = part.target->view;
  const int64_t rows = part.slice.rows();
  const int64_t row_bytes = target.size_bytes() / target.dim(0);
  std::byte* const data = target.As<std::byte>() + part.target_row * row_bytes;
  if (target.rank() == 1) return TensorView(data, target.dtype(), {rows}, target.device());
  return TensorView(data, target.dtype(), {rows, target.dim(1)}, target.device());
}

absl::Status Fill(const WeightPart& part, uint64_t seed, Backend& backend) {
  if (part.target == nullptr) return absl::OkStatus();
  const Distribution distribution = DistributionOf(part);
  return backend.FillRandom({.y = RowsOf(part),
                             .seed = XXH3_64bits_withSeed(part.name.data(), part.name.size(), seed),
                             .mean = distribution.mean,
                             .spread = distribution.deviation * std::sqrt(3.0),
                             .first_row = part.slice.row_begin,
                             .first_col = part.slice.col_begin,
                             .width = part.shape.size() == 2 ? part.shape[1] : 1});
}

}  // namespace

absl::StatusOr<ModelWeights> MakeDummyWeights(const ModelConfig& config,
                                              const DummyWeightsOptions& options,
                                              Backend& backend) {
  ModelWeights weights;
  const bool is_tied = config.tie_word_embeddings.value_or(false);
  const WeightsLayout layout(config, options.plan, {.has_lm_head = !is_tied}, weights);
  for (Tensor* const target : layout.targets()) {
    KVASIR_RETURN_IF_ERROR(AllocateTarget(*target, options.dtype, backend));
  }
  for (const WeightPart& part : layout.parts()) {
    KVASIR_RETURN_IF_ERROR(Fill(part, options.seed, backend));
  }
  if (is_tied) TieHead(config, options.plan, weights);
  return weights;
}

}  // namespace kvasir::worker
