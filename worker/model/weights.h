// One rank's weights, in the memory of a backend: its slices of the checkpoint's tensors, converted
// to the dtype that the worker computes in, or random ones (dummy_weights.h). Loaded once by the
// worker, and handed to the transformer. Only the rank's slices are read, on all threads of the
// backend's executor: peak memory is the result and a few MiB a thread. Thread-compatible.
//
// Matrices are [out_features, in_features], row-major, as in the checkpoint. Sizes below are the
// rank's own (ShardPlan): Hq query heads and Hkv KV heads of D dimensions, I columns of the MLP.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/tensor.h"
#include "worker/backend/memory.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"
#include "worker/model/shard_plan.h"

namespace kvasir::worker {

class Backend;  // worker/backend/backend.h

// A weight that the model does not have is empty, memory and view.
struct LayerWeights {
  Tensor input_norm;           // [hidden]
  Tensor qkv;                  // [(Hq + 2 Hkv) * D, hidden]: rows of q, then k, then v
  Tensor qkv_bias;             // [(Hq + 2 Hkv) * D], or empty
  Tensor q_norm, k_norm;       // [D], or empty
  Tensor output;               // [hidden, Hq * D]; the sum over ranks is the layer's output
  Tensor output_bias;          // [hidden] on rank 0, so that the sum has it once; else empty
  Tensor post_attention_norm;  // [hidden]
  Tensor gate_up;              // [2 I, hidden]: rows of gate, then up
  Tensor down;                 // [hidden, I]; the sum over ranks is the layer's output
};

struct ModelWeights {
  Tensor embedding;  // [vocab, hidden], whole on every rank
  std::vector<LayerWeights> layers;
  Tensor final_norm;  // [hidden]
  Tensor lm_head;     // [rows of ShardPlan::vocab, hidden]; a view into `embedding`, without
                      // memory of its own, when the two are tied
};

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
