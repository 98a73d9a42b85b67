// The stages of declared policies: which policies share them, and the options that their methods
// are made with. Called by the engine and by backends. Functions without state.
#pragma once

#include <string>

#include "kernels/sparse/common/method_options.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::worker {

// Returns the policy without its numbers: its methods with their options, the name of its reuse
// rule, and a top_p of 1 where it prunes. Policies that are equal in it share their stages, because
// numbers come with the rows.
v1::AttentionPolicy WithoutNumbers(const v1::AttentionPolicy& policy);

// Bytes that are equal for equal shapes. Not stored anywhere.
std::string ShapeBytes(const v1::AttentionPolicy& shape);

kernels::MethodOptions SelectorOptions(const v1::AttentionPolicy& policy);
kernels::MethodOptions TerminatorOptions(const v1::AttentionPolicy& policy);

}  // namespace kvasir::worker
