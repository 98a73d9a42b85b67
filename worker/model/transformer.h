// The model: from the tokens of a step to the logits of the rows that sample. It holds one rank's
// weights and hides the layers; what computes them and sums over ranks, in float32, is the
// backend's. Every row's result depends on that row and its own KV only. Made once when a worker
// loads a model, used by one engine at a time. Thread-compatible.
//
//   x = embedding(tokens)
//   each layer:  x += sum over ranks of attention(norm(x));  x += sum over ranks of mlp(norm(x))
//   logits = concatenation over ranks of head(norm(x)), for the rows that sample
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/paged/paged_kv.h"
#include "worker/attention_meter.h"
#include "worker/backend/backend.h"
#include "worker/model/activations.h"
#include "worker/model/attention_layer.h"
#include "worker/model/transformer_options.h"
#include "worker/model/weights.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

struct ForwardParams {
  const StepBatch& batch;
  const kernels::PagedKv& kv;
  Activations& activations;
  AttentionMeter& meter;
  Collective& collective;
};

class Transformer {
 public:
  // Hands the weights to the backend and frees them on the way. The backend outlives the model.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(ModelWeights weights,
                                                             const TransformerOptions& options,
                                                             Backend& backend);

  // Where the backend starts slowly, uses linear layers with row counts up to `max_tokens`, so that
  // no request pays for it. The activations may hold anything, and are overwritten.
  absl::Status WarmUp(const Activations& activations, int64_t max_tokens) const;

  // An error leaves the KV of the step undefined and the collective, perhaps, broken.
  absl::Status Forward(const ForwardParams& params);

  const TransformerOptions& options() const { return options_; }
  Backend& backend() const { return backend_; }
  kernels::KvLayout kv_layout(kernels::DType kv_dtype) const;
  // What Forward needs for steps of these sizes.
  ActivationSizes activation_sizes(int64_t max_tokens, int64_t max_logits_rows) const;

 private:
  struct Layer {
    AttentionLayer attention;
    Tensor post_attention_norm;
    std::unique_ptr<Linear> gate_up;
    std::unique_ptr<Linear> down;
  };

  Transformer(const TransformerOptions& options, Backend& backend)
      : options_(options), backend_(backend) {}

  absl::Status AddLayer(int64_t index, LayerWeights weights);
  // Embedding, layers and output head.
  absl::Status Compute(const ForwardParams& params, const kernels::TensorView& logits) const;
  absl::Status RunLayer(const ForwardParams& params, const Layer& layer) const;
  absl::Status RunMlp(const Activations& a, int64_t tokens, const Layer& layer) const;
  // A product that is added to the residual, but for its x: at once, or as this rank's summand
  // that AddSummands adds after it.
  kernels::LinearParams ToResidual(const Activations& a, int64_t tokens) const;
  absl::Status AddSummands(const ForwardParams& params) const;
  float norm_epsilon() const { return static_cast<float>(options_.config.rms_norm_eps); }
  absl::Status ComputeLogits(const ForwardParams& params, const kernels::TensorView& logits) const;
  bool is_parallel() const { return options_.shard.num_ranks > 1; }

  const TransformerOptions options_;
  Backend& backend_;
  Tensor embedding_;
  std::vector<Layer> layers_;
  Tensor final_norm_;
  std::unique_ptr<Linear> head_;
  std::unique_ptr<Rope> rope_;
};

}  // namespace kvasir::worker
