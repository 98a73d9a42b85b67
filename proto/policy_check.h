// The rules that one part of a sparsity policy, prefill or decode, must keep with the numbers of
// one request. They are written once: the coordinator asks when a policy is declared and when a
// request overrides its numbers, and a worker asks again, before it starts the sequence, for those
// that its kernels depend on. So what a worker would refuse is refused before it reaches one. They
// say nothing of the model, of a prompt or of a device: a policy that keeps them is served at every
// length of context. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::v1 {

// Whether a selector may leave anything out.
bool Selects(const AttentionPolicy& policy);

// Whether there is a terminator.
bool Terminates(const AttentionPolicy& policy);

// Whether any number is set.
bool HasNumbers(const ReusePolicy& reuse);

// Whether anything is set.
bool IsSet(const QualityPolicy& quality);

// The largest budget of any layer.
uint32_t LargestLayerBudget(const AttentionPolicy& policy);

// INVALID_ARGUMENT, naming the field below `where`, for a window that kernels refuse: one that is
// less than the selector needs, or than the steps that a selection serves.
absl::Status CheckWindow(const std::string& where, const AttentionPolicy& policy);

// The same, and for whatever else contradicts itself: no budget for a selector, layers named twice
// or out of order, and what needs a selector, a rule, a wish or a terminator that is not there.
// REQUIRES: defaults are filled in.
absl::Status CheckPolicyPart(const std::string& where, const AttentionPolicy& policy);

}  // namespace kvasir::v1
