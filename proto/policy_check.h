// Rules for one part of a sparsity policy, prefill or decode, with the numbers of one request. They
// are written once. The coordinator checks them when a policy is declared and when a request
// overrides its numbers. A worker checks those that its kernels depend on again, before it starts
// the sequence, so the coordinator refuses everything that a worker would. They do not depend on
// the model, a prompt or a device: a policy that keeps them is served at every length of context.
// Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::v1 {

// Whether a selector may leave tokens out.
bool Selects(const AttentionPolicy& policy);

// Whether there is a terminator.
bool Terminates(const AttentionPolicy& policy);

// Whether any number is set.
bool HasNumbers(const ReusePolicy& reuse);

// Whether anything is set.
bool IsSet(const QualityPolicy& quality);

// The largest budget of any layer.
uint32_t LargestLayerBudget(const AttentionPolicy& policy);

// INVALID_ARGUMENT, naming the field below `where`, for a window that kernels refuse: it is less
// than the selector needs, or less than the number of steps that a selection serves.
absl::Status CheckWindow(const std::string& where, const AttentionPolicy& policy);

// CheckWindow, and INVALID_ARGUMENT for every other contradiction: no budget for a selector, layers
// named twice or out of order, and numbers that need a selector, a reuse rule, a minimum mass or a
// terminator that is not set. REQUIRES: defaults are filled in.
absl::Status CheckPolicyPart(const std::string& where, const AttentionPolicy& policy);

}  // namespace kvasir::v1
