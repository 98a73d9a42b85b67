// Reads the weights of one rank from a checkpoint, and converts them to the dtype that the worker
// computes in. Reads only the rank's slices, on all threads of the backend's executor: peak memory
// is the result and a few MiB a thread. Called once, when a worker loads its model.
#pragma once

#include <functional>

#include "absl/status/statusor.h"

#include "kernels/base/dtype.h"
#include "worker/backend/backend.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/weights.h"

namespace kvasir::worker {

struct LoadWeightsOptions {
  ShardPlan plan;
  kernels::DType dtype = kernels::DType::kBFloat16;  // float32 or bfloat16
  // Called now and then with the fraction done, in [0, 1], by one thread at a time. May be empty.
  std::function<void(double fraction)> progress;
};

// Checks first that every tensor exists with its shape, then reads. INVALID_ARGUMENT when the
// folder does not hold this model; UNIMPLEMENTED when a tensor's dtype is not float32, bfloat16 or
// float16; DATA_LOSS when a weight is not finite or a file shrinks while it is read;
// RESOURCE_EXHAUSTED when memory runs out. Tensors that the model does not have are logged.
absl::StatusOr<ModelWeights> LoadWeights(const SafetensorsFolder& folder, const ModelConfig& config,
                                         const LoadWeightsOptions& options, Backend& backend);

}  // namespace kvasir::worker
