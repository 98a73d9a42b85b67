// The contract of quality in a policy: what may be declared, what a request may wish, and where it
// changes what is attended to. Called by policy.cc. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::coordinator {

// What the flags of `kvasir serve` say of it.
void SetQualityFromFlags(const v1::SparseConfig& config, v1::AttentionPolicy& policy);

// Fills in the default of on_violation, where there is a wish.
void SetQualityDefaults(v1::AttentionPolicy& policy);

// Works a request's wish into the policy's. INVALID_ARGUMENT where the policy declares none.
absl::Status OverrideQuality(const std::string& where, const v1::QualityPolicy& overrides,
                             v1::AttentionPolicy& policy);

// Beyond the trained window dense attention is what fails: INVALID_ARGUMENT where it would stand
// in.
absl::Status CheckNoDenseFallback(const v1::AttentionPolicy& policy, int64_t trained_window);

// Equal if and only if it changes attention equally; empty where it changes nothing. REQUIRES:
// SetQualityDefaults was called.
std::string CanonicalQuality(const v1::AttentionPolicy& policy);

}  // namespace kvasir::coordinator
