// A policy's stages, run on the queries that a model asks with and held against its own attention.
// What comes out stands in rows by (layer, query head), one number a step, so that whoever reads
// them can form any mean and percentile. Used by the fidelity program. Thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/quality/quality_contract.h"
#include "proto/kvasir/v1/sparsity.pb.h"
#include "tests/quality/true_attention.h"
#include <nlohmann/json.hpp>

namespace kvasir::quality {

class Method {
 public:
  // Of the policy's decode part. INVALID_ARGUMENT for stages that there are not.
  static absl::StatusOr<Method> Create(const v1::SparsityPolicy& policy);

  // Selects for the layer's steps, which `truth` was made from, and compares.
  absl::Status Compare(const kernels::SelectParams& params, const LayerAttention& truth,
                       kernels::Executor& executor);

  // {"policy", "seconds", "rows": [{"layer", "head", "kv_head", "mass": [...], ...}]}
  nlohmann::json ToJson() const;
  const kernels::PolicyNumbers& numbers() const { return numbers_; }

 private:
  // One number a step; of one (layer, query head).
  struct Row {
    int64_t kv_head = 0;
    std::vector<double> mass;              // kept
    std::vector<double> oracle;            // that as many tokens of the largest weights would keep
    std::vector<double> recall;            // share of those tokens that was selected
    std::vector<double> error;             // of the output
    std::vector<int64_t> tokens, context;  // attended to, and there are
    std::vector<int64_t> pages, pages_total;  // the same
    std::vector<int64_t> selected;            // tokens between sink and window
    std::vector<int64_t> minimal;  // of them, by weight, that reach top_p; only where it prunes
    // Where it has a min_mass: the mass that is estimated to be kept, and the ContractOutcome.
    std::vector<double> estimate;
    std::vector<int64_t> outcome;
  };

  absl::Status Select(const kernels::SelectParams& params, kernels::Executor& executor);
  void Measure(QueryAttention& query, std::span<const int32_t> tokens, Row& row) const;

  std::string name_;
  kernels::PolicyNumbers numbers_;
  std::unique_ptr<kernels::Selector> selector_;
  std::unique_ptr<kernels::Pruner> pruner_;  // null: none
  kernels::ContractKeeper keeper_;
  double seconds_ = 0;                               // of selecting
  std::map<std::pair<int64_t, int64_t>, Row> rows_;  // by layer and query head

  // Of the last Select.
  std::vector<kernels::SelectionHeader> headers_;
  std::vector<kernels::SelectionEntry> entries_;
  kernels::PageSelection selection_;
  kernels::Scratch scratch_;
};

}  // namespace kvasir::quality
