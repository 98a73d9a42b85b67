// The identity of a model for the reuse of its KV: two workers with the same hash compute the same
// keys and values from the same tokens, up to rounding. Part of every prefix key and of every
// stored extent. Called once when a worker starts. Functions without state.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/dtype.h"
#include "kernels/dense/gemm.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"

namespace kvasir::worker {

using ModelHash = std::array<uint8_t, 32>;

// SHA-256 over the configuration that KV depends on, the dtype of computation, how weights are kept
// and, for each weight file, its header and an XXH3-128 of its data. The same on every rank, for
// any number of ranks. Against accident, not forgery: who can write the model folder owns the
// model. `context_length` as for ComputeRopeFrequencies. Reads every byte of every file, at about
// the speed of the disk or the page cache: ranks of one host may take it from one of them.
// DATA_LOSS when a file shrinks while it is read.
absl::StatusOr<ModelHash> HashModel(const SafetensorsFolder& folder, const ModelConfig& config,
                                    int64_t context_length, kernels::DType dtype,
                                    kernels::WeightForm weights);

// The same of weights that are made from a seed (dummy_weights.h).
ModelHash HashDummyModel(uint64_t seed, const ModelConfig& config, int64_t context_length,
                         kernels::DType dtype, kernels::WeightForm weights);

}  // namespace kvasir::worker
