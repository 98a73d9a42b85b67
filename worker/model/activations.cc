#include "worker/model/activations.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::DType;
using kernels::TensorView;

absl::StatusOr<ActivationBuffer> ActivationBuffer::Create(Backend& backend, DType dtype,
                                                          int64_t max_rows, int64_t width) {
  ActivationBuffer buffer;
  buffer.dtype_ = dtype;
  buffer.max_rows_ = max_rows;
  buffer.width_ = width;
  const int64_t bytes = max_rows * width * static_cast<int64_t>(DTypeSize(dtype));
  KVASIR_ASSIGN_OR_RETURN(buffer.memory_, backend.Allocate(bytes));
  return buffer;
}

TensorView ActivationBuffer::Rows(int64_t rows) const {
  KVASIR_CHECK(rows <= max_rows_);
  return TensorView(memory_.data(), dtype_, {rows, width_}, memory_.device());
}

TensorView ActivationBuffer::Heads(int64_t rows, int64_t heads) const {
  KVASIR_CHECK(rows <= max_rows_);
  return TensorView(memory_.data(), dtype_, {rows, heads, width_ / heads}, memory_.device());
}

absl::StatusOr<Activations> Activations::Create(Backend& backend, const ActivationSizes& s) {
  Activations a;
  struct Part {
    ActivationBuffer* buffer;
    DType dtype;
    int64_t rows;
    int64_t width;
  };
  const int64_t tokens = s.max_tokens;
  const int64_t rows = s.max_logits_rows;
  const bool parallel = s.num_ranks > 1;
  const int64_t shared_tokens = s.kv_replicas > 1 ? tokens : 0;
  const Part parts[] = {
      {&a.residual, s.dtype, tokens, s.hidden},
      {&a.partial, DType::kFloat32, parallel ? tokens : 0, s.hidden},
      {&a.normed, s.dtype, tokens, s.hidden},
      {&a.qkv, s.dtype, tokens, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim},
      {&a.q, s.dtype, tokens, s.num_heads * s.head_dim},
      {&a.k, s.dtype, tokens, s.num_kv_heads * s.head_dim},
      {&a.v, s.dtype, tokens, s.num_kv_heads * s.head_dim},
      {&a.gathered_q, s.dtype, s.num_ranks * shared_tokens, s.num_heads * s.head_dim},
      {&a.group_q, s.dtype, shared_tokens, s.kv_replicas * s.num_heads * s.head_dim},
      {&a.attended, s.dtype, tokens, s.num_heads * s.head_dim},
      {&a.gate_up, s.dtype, tokens, 2 * s.intermediate},
      {&a.summand, s.dtype, parallel ? 0 : tokens, s.hidden},
      {&a.gated, s.dtype, tokens, s.intermediate},
      {&a.last_residual, s.dtype, rows, s.hidden},
      {&a.local_logits, DType::kFloat32, parallel ? rows : 0, s.vocab_rows},
      {&a.gathered_logits, DType::kFloat32, parallel ? rows * s.num_ranks : 0, s.vocab_rows},
      {&a.logits, DType::kFloat32, rows, s.vocab},
  };
  for (const Part& part : parts) {
    KVASIR_ASSIGN_OR_RETURN(*part.buffer,
                            ActivationBuffer::Create(backend, part.dtype, part.rows, part.width));
  }
  return a;
}

}  // namespace kvasir::worker
