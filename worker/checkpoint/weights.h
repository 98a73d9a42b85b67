// The weights of one rank, in the memory of a backend: its slices of the checkpoint's tensors
// (load_weights.h), or random values (dummy_weights.h). The worker hands them to the transformer.
//
// Matrices are [out_features, in_features], row-major, as in the checkpoint. Sizes below are the
// rank's own (ShardPlan): Hq query heads and Hkv KV heads of D dimensions, I columns of the MLP.
#pragma once

#include <vector>

#include "worker/checkpoint/memory.h"

namespace kvasir::worker {

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

}  // namespace kvasir::worker
