// The selector and the terminator of an AttentionPolicy by name. The name is that of its field in
// sparsity.proto, which flags, messages and kernels/sparse/methods.cc use too. With these functions
// a new method needs no code where policies are only passed on. Called by coordinator and worker.
// Thread-safe.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::v1 {

// Empty when none is set.
std::string SelectorName(const AttentionPolicy& policy);

// Sets the selector of that name, with its defaults, if there is one. Otherwise clears it.
void SetSelector(absl::string_view name, AttentionPolicy& policy);

// Returns the selector's options that are set: names and values of its message's fields, strings
// and floats. A float is written with all its bits.
std::vector<std::pair<std::string, std::string>> SelectorFields(const AttentionPolicy& policy);

// Returns the facts on the selector's field, for its options. None of the numbers is 0.
SelectorFacts FactsOf(const AttentionPolicy& policy);

// The same for the terminator.
std::string TerminatorName(const AttentionPolicy& policy);
void SetTerminator(absl::string_view name, AttentionPolicy& policy);
std::vector<std::pair<std::string, std::string>> TerminatorFields(const AttentionPolicy& policy);

}  // namespace kvasir::v1
