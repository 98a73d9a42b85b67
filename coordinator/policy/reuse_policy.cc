#include "coordinator/policy/reuse_policy.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"

#include "proto/policy_check.h"
#include "proto/selector_field.h"

namespace kvasir::coordinator {
namespace {

constexpr char kInterval[] = "interval", kCosine[] = "cosine", kBoth[] = "both";

bool ReadsInterval(const v1::ReusePolicy& reuse) { return reuse.rule() != kCosine; }
bool ReadsTheta(const v1::ReusePolicy& reuse) { return reuse.rule() != kInterval; }

}  // namespace

void SetReuseFromFlags(const v1::SparseConfig& config, v1::AttentionPolicy& policy) {
  if (config.sparse_reuse().empty() || config.sparse_reuse() == "none") return;
  v1::ReusePolicy& reuse = *policy.mutable_reuse();
  reuse.set_rule(config.sparse_reuse());
  reuse.set_interval(config.sparse_reuse_interval());
  reuse.set_theta(static_cast<float>(config.sparse_reuse_theta()));
}

void SetReuseDefaults(v1::AttentionPolicy& policy) {
  if (policy.reuse().rule().empty()) return;
  v1::ReusePolicy& reuse = *policy.mutable_reuse();
  const bool own_intervals = v1::FactsOf(policy).own_intervals();
  const auto default_of = [](int field) {
    return v1::ReusePolicy::descriptor()->FindFieldByNumber(field)->options().GetExtension(
        v1::policy_default);
  };
  using Reuse = v1::ReusePolicy;
  if (reuse.interval() == 0 && !own_intervals) {
    reuse.set_interval(static_cast<uint32_t>(default_of(Reuse::kIntervalFieldNumber)));
  }
  if (reuse.theta() == 0) {
    reuse.set_theta(static_cast<float>(default_of(Reuse::kThetaFieldNumber)));
  }
  if (reuse.theta_force() == 0) {
    reuse.set_theta_force(static_cast<float>(default_of(Reuse::kThetaForceFieldNumber)));
  }
  if (reuse.max_age() == 0) {
    reuse.set_max_age(static_cast<uint32_t>(default_of(Reuse::kMaxAgeFieldNumber)));
  }
}

absl::Status OverrideReuse(const std::string& where, const v1::ReusePolicy& overrides,
                           v1::AttentionPolicy& policy) {
  if (!overrides.rule().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where,
                     ".reuse sets a rule; a request may override numbers only: choose a declared "
                     "policy by policy.name instead"));
  }
  if (!HasNumbers(overrides)) return absl::OkStatus();
  if (policy.reuse().rule().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " sets reuse, but the policy declares no reuse"));
  }
  policy.mutable_reuse()->MergeFrom(overrides);  // fields that are 0 stay
  return absl::OkStatus();
}

std::string CanonicalReuse(const v1::AttentionPolicy& policy) {
  const v1::ReusePolicy& reuse = policy.reuse();
  if (reuse.rule().empty()) return "";
  std::string bytes = absl::StrCat(";reuse=", reuse.rule());
  if (ReadsInterval(reuse)) absl::StrAppend(&bytes, ";interval=", reuse.interval());
  const auto bits = [](float x) { return absl::Hex(std::bit_cast<uint32_t>(x)); };
  if (ReadsTheta(reuse)) absl::StrAppend(&bytes, ";theta=", bits(reuse.theta()));
  if (reuse.rule() == kBoth) absl::StrAppend(&bytes, ";theta_force=", bits(reuse.theta_force()));
  if (reuse.rule() == kCosine) absl::StrAppend(&bytes, ";max_age=", reuse.max_age());
  return bytes;
}

}  // namespace kvasir::coordinator
