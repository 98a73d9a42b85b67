// A backend for benchmarks. Instead of computing a step it can write random keys and values into
// the step's pages, which fills contexts of any length quickly. They go through AppendHeads like a
// model's own, with bounds and key codes. Its layers can also use given queries instead of their
// own. Thread-compatible.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "tests/support/forwarding_backend.h"

namespace kvasir::worker {

class SyntheticKvBackend final : public ForwardingBackend {
 public:
  // `inner` outlives it.
  explicit SyntheticKvBackend(Backend& inner) : ForwardingBackend(inner) {}

  // Sets, between steps, whether the next steps are filled. They must be of prompts, and sample
  // nothing.
  void set_filling(bool filling) { filling_ = filling; }

  // When the last step's tables were made, when its end was asked for, and when it was over.
  struct StepTimes {
    std::chrono::steady_clock::time_point begun, ending, ended;
  };
  const StepTimes& times() const { return times_; }
  // Sets the queries of steps that have a token per sequence: [layers][sequences, query heads,
  // head_dim], in memory of Allocate. Called before the first step.
  void set_queries(std::vector<kernels::TensorView> queries) { queries_ = std::move(queries); }
  // Returns the KV of the last step, with the accesses that kernels recorded.
  const kernels::PagedKv& kv() const { return *kv_; }

  bool RunsAhead() const override { return false; }
  absl::StatusOr<bool> BeginStep(const StepInputs& step) override {
    kv_ = step.kv;
    KVASIR_ASSIGN_OR_RETURN(const bool wants_ops, inner().BeginStep(step));
    times_.begun = std::chrono::steady_clock::now();
    if (!filling_) return wants_ops;
    KVASIR_RETURN_IF_ERROR(Fill(step.batch, step.kv.layout));
    return false;
  }
  absl::Status EndStep(const StepOutputs& outputs) override {
    times_.ending = std::chrono::steady_clock::now();
    return inner().EndStep(outputs);
  }
  // A filling step computes nothing, but its KV is valid: all rows count as finite.
  absl::Status Collect(StepResult& result) override {
    KVASIR_RETURN_IF_ERROR(inner().Collect(result));
    times_.ended = std::chrono::steady_clock::now();
    if (filling_) result.row_is_finite.assign(result.row_is_finite.size(), 1);
    return absl::OkStatus();
  }

  absl::Status Select(const LayerQueries& queries) override {
    return inner().Select(Replaced(queries));
  }
  absl::Status Attend(const LayerQueries& queries, const kernels::TensorView& out) override {
    return inner().Attend(Replaced(queries), out);
  }

 private:
  LayerQueries Replaced(LayerQueries queries) const {
    if (queries_.empty()) return queries;
    const kernels::TensorView& q = queries_[static_cast<size_t>(queries.layer)];
    if (q.dim(0) == queries.q.dim(0)) queries.q = q;
    return queries;
  }

  // Fills with values of variance 1, as in a dummy model.
  absl::Status Fill(const StepBatch& batch, const kernels::KvLayout& layout) {
    const int64_t tokens = batch.num_tokens();
    const int64_t width = layout.num_kv_heads * layout.head_dim;
    const int64_t bytes =
        2 * tokens * width * static_cast<int64_t>(DTypeSize(layout.element_dtype()));
    if (bytes > heads_.size_bytes()) {
      KVASIR_ASSIGN_OR_RETURN(heads_, inner().Allocate(bytes));
      KVASIR_ASSIGN_OR_RETURN(room_, inner().Allocate(bytes));
    }
    const auto view = [&](std::byte* data, int64_t num_heads) {
      return kernels::TensorView(data, layout.element_dtype(), {tokens, num_heads, layout.head_dim},
                                 room_.device());
    };
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      const kernels::TensorView kv(heads_.data(), layout.element_dtype(), {tokens, 2 * width},
                                   heads_.device());
      KVASIR_RETURN_IF_ERROR(inner().FillRandom(
          {.y = kv, .seed = ++fills_, .spread = std::sqrt(3.0), .width = 2 * width}));
      KVASIR_RETURN_IF_ERROR(
          inner().AppendHeads({.layer = layer,
                               .qkv = kv,
                               .q = view(room_.data(), 0),
                               .k = view(room_.data(), layout.num_kv_heads),
                               .v = view(room_.data() + bytes / 2, layout.num_kv_heads)}));
    }
    return absl::OkStatus();
  }

  bool filling_ = false;
  StepTimes times_;
  std::vector<kernels::TensorView> queries_;
  std::optional<kernels::PagedKv> kv_;
  uint64_t fills_ = 0;
  Memory heads_, room_;
};

}  // namespace kvasir::worker
