// The reuse part of a policy: the values that may be declared, the overrides of a request, and the
// numbers that matter. Called by policy.cc. Thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::coordinator {

// Sets reuse from the flags of `kvasir serve`.
void SetReuseFromFlags(const v1::SparseConfig& config, v1::AttentionPolicy& policy);

// Fills in the defaults of the numbers that the rule reads.
void SetReuseDefaults(v1::AttentionPolicy& policy);

// Merges a request's numbers into the policy's. INVALID_ARGUMENT when they set a rule, or when the
// policy has none.
absl::Status OverrideReuse(const std::string& where, const v1::ReusePolicy& overrides,
                           v1::AttentionPolicy& policy);

// Returns bytes that are equal if and only if reuse is equal; empty without reuse. REQUIRES:
// SetReuseDefaults was called.
std::string CanonicalReuse(const v1::AttentionPolicy& policy);

}  // namespace kvasir::coordinator
