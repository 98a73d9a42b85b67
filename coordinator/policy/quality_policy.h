// The contract of quality in a policy: the values that may be declared, the wishes of a request,
// and when the contract changes attention. Called by policy.cc. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::coordinator {

// Sets the contract from the flags of `kvasir serve`.
void SetQualityFromFlags(const v1::SparseConfig& config, v1::AttentionPolicy& policy);

// Fills in the default of on_violation when the policy has a wish.
void SetQualityDefaults(v1::AttentionPolicy& policy);

// Merges a request's wish into the policy's. INVALID_ARGUMENT when the policy declares none.
absl::Status OverrideQuality(const std::string& where, const v1::QualityPolicy& overrides,
                             v1::AttentionPolicy& policy);

// INVALID_ARGUMENT when a violation would fall back to dense attention, which fails beyond the
// trained window.
absl::Status CheckNoDenseFallback(const v1::AttentionPolicy& policy, int64_t trained_window);

// Returns bytes that are equal if and only if the contract changes attention equally; empty when
// it changes nothing. REQUIRES: SetQualityDefaults was called.
std::string CanonicalQuality(const v1::AttentionPolicy& policy);

}  // namespace kvasir::coordinator
