// Tensors that layers hand to each other in a forward pass: memory of a backend, taken once for the
// largest step, and views of it for a step of some number of tokens. Owned by the engine, lent to
// the transformer. Thread-compatible.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/tensor.h"
#include "worker/backend/backend.h"

namespace kvasir::worker {

// Sizes of one rank's part of the model.
struct ActivationSizes {
  kernels::DType dtype = kernels::DType::kFloat32;
  int64_t hidden = 0;
  int64_t num_heads = 0;  // of this rank, as all below
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;       // of the whole model
  int64_t vocab_rows = 0;  // of the widest rank
  int64_t num_ranks = 1;
  int64_t kv_replicas = 1;  // ranks that share a KV head
  // Sizes of the largest step.
  int64_t max_tokens = 0;
  int64_t max_logits_rows = 0;
};

// A buffer that is viewed with as many rows as a step has.
class ActivationBuffer {
 public:
  static absl::StatusOr<ActivationBuffer> Create(Backend& backend, kernels::DType dtype,
                                                 int64_t max_rows, int64_t width);
  ActivationBuffer() = default;

  // REQUIRES: rows <= max_rows.
  kernels::TensorView Rows(int64_t rows) const;
  int64_t max_rows() const { return max_rows_; }
  // Views the same memory as [rows, heads, width / heads].
  kernels::TensorView Heads(int64_t rows, int64_t heads) const;

 private:
  Memory memory_;
  kernels::DType dtype_ = kernels::DType::kFloat32;
  int64_t max_rows_ = 0;
  int64_t width_ = 0;
};

struct Activations {
  static absl::StatusOr<Activations> Create(Backend& backend, const ActivationSizes& sizes);

  // dtype of the model, except where float32 is named.
  ActivationBuffer residual;  // [tokens, hidden]: x, to which every layer adds
  ActivationBuffer partial;   // [tokens, hidden] float32: this rank's summand of x
  ActivationBuffer normed;    // [tokens, hidden]
  ActivationBuffer qkv;       // [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  ActivationBuffer q;         // [tokens, num_heads * head_dim]
  ActivationBuffer k, v;      // [tokens, num_kv_heads * head_dim]
  // Where ranks share a KV head: q of all ranks, and the heads of q that belong to this rank's KV
  // head.
  ActivationBuffer gathered_q;  // [ranks * tokens, num_heads * head_dim]
  ActivationBuffer group_q;     // [tokens, kv_replicas * num_heads * head_dim]
  ActivationBuffer attended;    // [tokens, num_heads * head_dim]
  // A product before it is gated or added: [tokens, 2 * intermediate or hidden].
  ActivationBuffer gate_up, summand;
  ActivationBuffer gated;            // [tokens, intermediate]
  ActivationBuffer last_residual;    // [logits rows, hidden]
  ActivationBuffer local_logits;     // [logits rows, vocab_rows] float32
  ActivationBuffer gathered_logits;  // [ranks * logits rows, vocab_rows] float32
  ActivationBuffer logits;           // [logits rows, vocab] float32
};

}  // namespace kvasir::worker
