// The model: from the tokens of a step to the logits of the rows that sample. It holds one rank's
// weights and hides the layers. The backend computes them and sums over ranks, in float32. Every
// row's result depends only on that row and its own KV. Made once when a worker loads a model, used
// by one engine at a time. Thread-compatible.
//
//   x = embedding(tokens)
//   each layer:  x += sum over ranks of attention(norm(x));  x += sum over ranks of mlp(norm(x))
//   logits = concatenation over ranks of head(norm(x)), for the rows that sample
// The last layer's mlp and the head are computed for the rows that sample and for tokens that are
// scored alone, in groups of as many rows as the activations hold logits of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/paged/paged_kv.h"
#include "worker/backend/backend.h"
#include "worker/batch/attention_meter.h"
#include "worker/checkpoint/transformer_options.h"
#include "worker/checkpoint/weights.h"
#include "worker/model/activations.h"
#include "worker/model/attention_layer.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

struct ForwardParams {
  const StepBatch& batch;
  const kernels::PagedKv& kv;
  const Activations& activations;
  AttentionMeter& meter;
  Collective& collective;
};

class Transformer {
 public:
  // Hands the weights to the backend, and frees them on the way. The backend outlives the model.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(ModelWeights weights,
                                                             const TransformerOptions& options,
                                                             Backend& backend);

  // Where the backend starts slowly, uses linear layers with row counts up to `max_tokens`, so that
  // no request pays for it. Overwrites the activations.
  absl::Status WarmUp(const Activations& activations, int64_t max_tokens) const;

  // An error leaves the KV of the step undefined, and may leave the collective broken.
  absl::Status Forward(const ForwardParams& params);

  const TransformerOptions& options() const { return options_; }
  Backend& backend() const { return backend_; }
  kernels::KvLayout kv_layout(kernels::DType kv_dtype) const;
  // Returns the sizes of Forward's activations for steps up to these sizes.
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
  absl::Status Compute(const StepContext& step, const kernels::TensorView& logits) const;
  // The second half of a layer. `x` is Norm's and `down` AddTo's, of any rows of the residual.
  // Ranks add their summands after it.
  absl::Status RunMlp(kernels::LinearParams x, kernels::LinearParams down, const Activations& a,
                      const Layer& layer) const;
  // The input of a half of a layer, or of the output head: rows of the residual and their norm, or
  // a.normed where that holds them already.
  kernels::LinearParams Norm(const kernels::TensorView& residual, const Tensor& norm,
                             bool is_normed, const Activations& a) const;
  // A product, without its x, that is added to rows of the residual: at once, or as this rank's
  // summand, which AddSummands adds. With `next_norm` the sums are normalized as well, where that
  // suits `layer`.
  kernels::LinearParams AddTo(const kernels::TensorView& residual, const Linear& layer,
                              const Tensor* next_norm, const Activations& a) const;
  absl::Status AddSummands(const kernels::TensorView& residual, const Activations& a) const;
  // Log probabilities of the scored tokens.
  absl::Status ScoreTokens(const StepContext& step, const kernels::TensorView& residual) const;
  // The last layer's MLP and the output head, for rows whose logits are used alone: nothing else
  // reads what follows the last layer's keys and values. `rows` [logits rows, hidden] is
  // overwritten.
  absl::Status FinishRows(const kernels::TensorView& rows, const Activations& a,
                          const kernels::TensorView& logits) const;
  // `x` is Norm's of the rows.
  absl::Status ComputeLogits(kernels::LinearParams x, const Activations& a,
                             const kernels::TensorView& logits) const;
  float norm_epsilon() const { return static_cast<float>(options_.config.rms_norm_eps); }
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
