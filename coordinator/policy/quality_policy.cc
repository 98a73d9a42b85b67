#include "coordinator/policy/quality_policy.h"

#include <bit>

#include "absl/strings/str_cat.h"

#include "proto/policy_check.h"

namespace kvasir::coordinator {
namespace {

constexpr char kDense[] = "dense", kWiden[] = "widen", kReport[] = "report";

bool HasWish(const v1::AttentionPolicy& policy) { return policy.quality().min_mass() != 0; }

}  // namespace

void SetQualityFromFlags(const v1::SparseConfig& config, v1::AttentionPolicy& policy) {
  if (config.sparse_min_mass() == 0) return;
  v1::QualityPolicy& quality = *policy.mutable_quality();
  quality.set_min_mass(static_cast<float>(config.sparse_min_mass()));
  quality.set_on_violation(config.sparse_on_violation());
  quality.set_max_budget_tokens(config.sparse_max_budget_tokens());
}

void SetQualityDefaults(v1::AttentionPolicy& policy) {
  if (!HasWish(policy) || !policy.quality().on_violation().empty()) return;
  policy.mutable_quality()->set_on_violation(kDense);
}

absl::Status OverrideQuality(const std::string& where, const v1::QualityPolicy& overrides,
                             v1::AttentionPolicy& policy) {
  if (!IsSet(overrides)) return absl::OkStatus();
  if (!HasWish(policy)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where,
                     " sets quality, but the policy declares no min_mass, and so keeps nothing to "
                     "estimate it by; declare one, with on_violation report if need be"));
  }
  v1::QualityPolicy& quality = *policy.mutable_quality();
  // The policy's bound belongs to the policy's action.
  if (!overrides.on_violation().empty() && overrides.on_violation() != kWiden) {
    quality.clear_max_budget_tokens();
  }
  quality.MergeFrom(overrides);  // fields that are 0 or empty stay
  return absl::OkStatus();
}

absl::Status CheckNoDenseFallback(const v1::AttentionPolicy& policy, int64_t trained_window) {
  if (!HasWish(policy) || policy.quality().on_violation() != kDense) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the policy's quality.on_violation is dense, and prompt and answer may be longer than the ",
      trained_window,
      " tokens the model was trained for: dense attention is what fails there; set "
      "policy.decode_overrides.quality.on_violation to widen or report"));
}

std::string CanonicalQuality(const v1::AttentionPolicy& policy) {
  const v1::QualityPolicy& quality = policy.quality();
  if (!HasWish(policy) || quality.on_violation() == kReport) return "";
  std::string bytes =
      absl::StrCat(";on_violation=", quality.on_violation(),
                   ";min_mass=", absl::Hex(std::bit_cast<uint32_t>(quality.min_mass())));
  if (quality.on_violation() == kWiden) {
    absl::StrAppend(&bytes, ";max_budget=", quality.max_budget_tokens());
  }
  return bytes;
}

}  // namespace kvasir::coordinator
