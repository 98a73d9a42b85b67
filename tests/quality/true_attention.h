// The truth that selections are held against: one layer's dense attention at some decode steps, as
// weights in double precision, for every (step, query head). Definitions: docs/quality.md. Used by
// the fidelity program. Thread-safe once made, but for MiddleByWeight of one query.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/sparse/common/stages.h"

namespace kvasir::quality {

// Keys and values of one KV head, [tokens, head_dim] each.
struct HeadKv {
  std::vector<float> keys, values;
};

// Where selectors choose, for the query at position p: between sink and window (rule R1).
struct Middle {
  int64_t begin = 0;
  int64_t end = 0;

  static Middle Of(const kernels::PolicyNumbers& numbers, int64_t p);
  bool contains(int64_t token) const { return token >= begin && token < end; }
};

// Of one query head at one step.
class QueryAttention {
 public:
  QueryAttention(std::vector<float> query, const HeadKv& kv, int64_t num_tokens, float scale);

  int64_t num_tokens() const { return static_cast<int64_t>(weights_.size()); }
  const std::vector<float>& query() const { return query_; }
  const std::vector<float>& logits() const { return logits_; }  // scaled
  double weight(int64_t token) const { return weights_[static_cast<size_t>(token)]; }
  // Mass of the tokens that are not in the middle.
  double MassAround(const Middle& middle) const;
  // Tokens of the middle by descending weight, later ones first among equals. Kept for the next
  // call with the same middle.
  const std::vector<int32_t>& MiddleByWeight(const Middle& middle);
  // norm(o_hat - o) / norm(o): o of all tokens, o_hat of these ones, its weights summing to 1.
  double OutputError(std::span<const int32_t> tokens) const;

 private:
  std::vector<double> Output(std::span<const int32_t> tokens) const;

  const std::vector<float> query_;
  const HeadKv& kv_;
  std::vector<float> logits_;
  std::vector<double> weights_;
  std::vector<double> output_;
  Middle ranked_middle_;
  std::vector<int32_t> ranked_;
};

// Of one layer and some steps.
struct LayerAttention {
  // `params` as a selector gets them, with blocks of one query each.
  LayerAttention(const kernels::SelectParams& params, kernels::Executor& executor);

  int64_t kv_head(int64_t head) const { return head * num_kv_heads / num_heads; }
  QueryAttention& at(int64_t step, int64_t head) const {
    return *queries[static_cast<size_t>(step * num_heads + head)];
  }
  // Of a step, the query heads [first_head, first_head + count).
  std::span<const std::unique_ptr<QueryAttention>> group_at(int64_t step, int64_t first_head,
                                                            int64_t count) const {
    return std::span(queries).subspan(static_cast<size_t>(step * num_heads + first_head),
                                      static_cast<size_t>(count));
  }

  int64_t layer = 0;
  int64_t num_steps = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  std::vector<HeadKv> kv;                                // of each KV head
  std::vector<std::unique_ptr<QueryAttention>> queries;  // [steps, heads]
};

}  // namespace kvasir::quality
