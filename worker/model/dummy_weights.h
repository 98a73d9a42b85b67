// Random weights for a model that is only a shape (--load-format=dummy), made in the memory of a
// backend, for measuring speed. Called by loaded_model.cc in place of LoadWeights. A function
// without state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "worker/backend/backend.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/weights.h"

namespace kvasir::worker {

struct DummyWeightsOptions {
  ShardPlan plan;
  kernels::DType dtype = kernels::DType::kBFloat16;  // float32 or bfloat16
  uint64_t seed = 0;
};

// Every element is a function of the seed, its tensor's name and its place in the whole tensor: the
// model is the same on any number of ranks and any backend. Norms are 1. A matrix has the variance
// that keeps that of its input, so that activations stay finite. Biases are small.
// RESOURCE_EXHAUSTED when memory runs out.
absl::StatusOr<ModelWeights> MakeDummyWeights(const ModelConfig& config,
                                              const DummyWeightsOptions& options, Backend& backend);

}  // namespace kvasir::worker
