#include "worker/engine/selector_table.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/policy.h"
#include "proto/selector_field.h"
#include "worker/batch/policy_stages.h"

namespace kvasir::worker {
namespace {

// Refused where ranks share a KV head: the heads of a group decide together where their row ends.
absl::Status CheckMayEndEarly(const std::string& terminator, const ShardPlan& shard) {
  if (shard.kv_replicas == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      terminator, " needs all query heads of a KV head on one rank; with ", shard.num_ranks,
      " ranks ", shard.kv_replicas, " share one: lower --tensor-parallel-size to ",
      shard.num_ranks / shard.kv_replicas));
}

// Methods that estimate attention do so at native or compact positions only.
absl::Status CheckPositions(const v1::AttentionPolicy& policy, PositionExtension extension) {
  if (extension != PositionExtension::kSelfExtend) return absl::OkStatus();
  const std::string terminator = v1::TerminatorName(policy);
  const char* const estimates = policy.top_p() != 0                ? "top_p"
                                : policy.quality().min_mass() != 0 ? "quality.min_mass"
                                : !terminator.empty()              ? terminator.c_str()
                                                                   : nullptr;
  if (estimates == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a policy has ", estimates,
                   ", which knows no grouped positions; drop it, or serve with "
                   "--position-extension=streaming"));
}

}  // namespace

absl::StatusOr<int64_t> SelectorTable::Add(const v1::AttentionPolicy& policy,
                                           const TransformerOptions& model) {
  const std::string name = v1::SelectorName(policy);
  if (name.empty()) return absl::InvalidArgumentError("a policy names no selector");
  const std::string& rule = policy.reuse().rule();
  const std::string terminator = v1::TerminatorName(policy);
  KVASIR_RETURN_IF_ERROR(CheckPositions(policy, model.extension));
  v1::AttentionPolicy shape = WithoutNumbers(policy);
  const auto known = std::find_if(shapes_.begin(), shapes_.end(), [&](const auto& other) {
    return ShapeBytes(other) == ShapeBytes(shape);
  });
  if (known != shapes_.end()) return known - shapes_.begin();
  ServedSelector served = {.selector = nullptr, .dense = name == "all" && terminator.empty()};
  KVASIR_ASSIGN_OR_RETURN(served.selector, kernels::MakeSelector(name, SelectorOptions(policy)));
  if (!rule.empty()) {
    KVASIR_ASSIGN_OR_RETURN(served.reuse, kernels::MakeReuseRule(rule));
  }
  if (policy.top_p() != 0) {
    KVASIR_ASSIGN_OR_RETURN(served.pruner, kernels::MakePruner("top_p"));
  }
  if (!terminator.empty()) {
    KVASIR_RETURN_IF_ERROR(CheckMayEndEarly(terminator, model.shard));
    KVASIR_ASSIGN_OR_RETURN(served.terminator,
                            kernels::MakeTerminator(terminator, TerminatorOptions(policy)));
  }
  served_.push_back(std::move(served));
  shapes_.push_back(std::move(shape));
  return std::ssize(served_) - 1;
}

absl::Status SelectorTable::Prepare(const Backend& backend) {
  for (size_t i = 0; i < served_.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(backend.Serve(shapes_[i], served_[i]));
  }
  return absl::OkStatus();
}

bool SelectorTable::NeedsKeyCodes() const {
  return std::any_of(served_.begin(), served_.end(), [](const ServedSelector& served) {
    return served.selector->NeedsKeyCodes() ||
           (served.pruner != nullptr && served.pruner->NeedsKeyCodes());
  });
}

}  // namespace kvasir::worker
