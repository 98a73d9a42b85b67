#include "worker/model/activations.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::DType;
using kernels::TensorView;

absl::StatusOr<ActivationBuffer> ActivationBuffer::Create(DType dtype, int64_t max_rows,
                                                          int64_t width) {
  ActivationBuffer buffer;
  buffer.dtype_ = dtype;
  buffer.max_rows_ = max_rows;
  buffer.width_ = width;
  const int64_t bytes = max_rows * width * static_cast<int64_t>(DTypeSize(dtype));
  KVASIR_ASSIGN_OR_RETURN(buffer.memory_, kernels::HostBuffer::Allocate(bytes));
  return buffer;
}

TensorView ActivationBuffer::Rows(int64_t rows) const {
  KVASIR_CHECK(rows <= max_rows_);
  return TensorView(memory_.data(), dtype_, {rows, width_});
}

TensorView ActivationBuffer::Heads(int64_t rows, int64_t heads) const {
  KVASIR_CHECK(rows <= max_rows_);
  return TensorView(memory_.data(), dtype_, {rows, heads, width_ / heads});
}

absl::StatusOr<Activations> Activations::Create(const ActivationSizes& s) {
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
      {&a.delta, s.dtype, tokens, s.hidden},
      {&a.partial, DType::kFloat32, parallel ? tokens : 0, s.hidden},
      {&a.normed, s.dtype, tokens, s.hidden},
      {&a.q, s.dtype, tokens, s.num_heads * s.head_dim},
      {&a.k, s.dtype, tokens, s.num_kv_heads * s.head_dim},
      {&a.v, s.dtype, tokens, s.num_kv_heads * s.head_dim},
      {&a.gathered_q, s.dtype, s.num_ranks * shared_tokens, s.num_heads * s.head_dim},
      {&a.group_q, s.dtype, shared_tokens, s.kv_replicas * s.num_heads * s.head_dim},
      {&a.attended, s.dtype, tokens, s.num_heads * s.head_dim},
      {&a.lse, DType::kFloat32, tokens, s.num_heads},
      {&a.gate_up, s.dtype, tokens, 2 * s.intermediate},
      {&a.gated, s.dtype, tokens, s.intermediate},
      {&a.last_residual, s.dtype, rows, s.hidden},
      {&a.last_delta, s.dtype, rows, s.hidden},
      {&a.local_logits, DType::kFloat32, parallel ? rows : 0, s.vocab_rows},
      {&a.gathered_logits, DType::kFloat32, parallel ? rows * s.num_ranks : 0, s.vocab_rows},
      {&a.logits, DType::kFloat32, rows, s.vocab},
  };
  for (const Part& part : parts) {
    KVASIR_ASSIGN_OR_RETURN(*part.buffer,
                            ActivationBuffer::Create(part.dtype, part.rows, part.width));
  }
  KVASIR_ASSIGN_OR_RETURN(a.gemm_scratch, kernels::HostBuffer::Allocate(s.gemm_scratch_bytes));
  return a;
}

absl::StatusOr<kernels::PageSelection> Activations::MakeSelection(
    const StepBatch& batch, std::span<const kernels::SelectionNumbers> numbers,
    int64_t num_kv_heads) {
  const int64_t num_rows = std::ssize(batch.blocks) * num_kv_heads;
  int64_t capacity = 0;
  for (const SelectorGroup& group : batch.groups) {
    for (int64_t b = group.begin; b < group.end; ++b) {
      const kernels::QueryBlock& block = batch.blocks[static_cast<size_t>(b)];
      const int64_t tokens = block.first_position + block.num_rows;
      kernels::SelectionNumbers largest = numbers[static_cast<size_t>(b)];
      largest.budget_tokens = kernels::LargestBudget(largest, tokens);
      capacity = std::max(capacity, group.served->selector->MaxEntries(largest, tokens));
    }
  }
  headers.resize(static_cast<size_t>(num_rows));
  const int64_t bytes = num_rows * capacity * static_cast<int64_t>(sizeof(kernels::SelectionEntry));
  KVASIR_ASSIGN_OR_RETURN(std::byte* const memory, entries.Reserve(bytes));
  return kernels::PageSelection{.headers = headers.data(),
                                .entries = reinterpret_cast<kernels::SelectionEntry*>(memory),
                                .num_rows = num_rows,
                                .capacity = capacity};
}

}  // namespace kvasir::worker
