// The identity of a model for the reuse of its KV: two workers with the same hash compute the same
// keys and values from the same tokens, up to rounding. Part of every prefix key and of every
// stored extent. Called once when a worker starts. Functions without state.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/dtype.h"
#include "kernels/base/executor.h"
#include "kernels/gemm/gemm.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"

namespace kvasir::worker {

using ModelHash = std::array<uint8_t, 32>;

// Facts that a model's KV depends on, besides its files.
struct ModelIdentity {
  const ModelConfig& config;
  int64_t context_length = 0;                        // as in ComputeRopeFrequencies
  kernels::DType dtype = kernels::DType::kBFloat16;  // of computation
  kernels::WeightForm weights = kernels::WeightForm::kAsInput;
};

// Returns the SHA-256 over the parts of the configuration that KV depends on, the dtype of
// computation, the form of the weights and, for each weight file, its header and the XXH3-128 of
// every 4 MiB of its data. It is the same on every rank, for any number of ranks and threads. It
// guards against accident, not forgery: whoever can write the model folder owns the model. Reads
// every byte of every file, on all threads of the executor, at about the speed of the disk or the
// page cache. DATA_LOSS when a file shrinks while it is read.
absl::StatusOr<ModelHash> HashModel(const SafetensorsFolder& folder, const ModelIdentity& identity,
                                    kernels::Executor& executor);

// The hash of weights that are made from a seed (dummy_weights.h).
ModelHash HashDummyModel(uint64_t seed, const ModelIdentity& identity);

}  // namespace kvasir::worker
