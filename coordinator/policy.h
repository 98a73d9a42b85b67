// What a request attends to: declared policies, a request's choice among them, and the canonical
// bytes that make policies part of prefix keys. Hidden: which numbers matter to which selector.
// Called by request parsing (Resolve) and the scheduler (the rest). Thread-safe once made.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::coordinator {

// A declared policy with the numbers of one sequence; nothing is left to defaults.
struct ResolvedPolicy {
  uint32_t index = 0;  // into the declared policies
  v1::AttentionPolicy prefill;
  v1::AttentionPolicy decode;
  uint32_t tail_tokens = 0;
};

// Whether anything may be left out: by a selector, or by a terminator.
bool IsSparse(const v1::AttentionPolicy& policy);

// Equal bytes if and only if attention under the policies is equal: the methods and those of their
// numbers that they read, a budget in the blocks that are selected, and what a contract of quality
// does.
std::string CanonicalBytes(const v1::AttentionPolicy& policy);

// First position whose KV would be another if the prompt went on behind it: from there on attention
// follows the decode part of the policy. INT64_MAX when both parts are dense. No other request may
// find a block that reaches behind it, and no cached block may stand in for one.
int64_t PrivateBegin(const ResolvedPolicy& policy, int64_t prompt_tokens);

// Where positions are compact: INVALID_ARGUMENT unless every query of a sequence of `tokens`
// attends to no more than the model was trained for. `trained_window` 0: they are not compact.
absl::Status CheckTrainedWindow(const ResolvedPolicy& policy, int64_t tokens,
                                int64_t trained_window);

// Where positions are compact: bounds what a contract of quality may widen the budget to by what
// the model was trained for. `trained_window` 0: they are not compact.
void LimitWidening(int64_t trained_window, v1::AttentionPolicy& policy);

// The policy that the flags of `kvasir serve` describe, named "default".
v1::SparsityPolicy PolicyFromFlags(const v1::SparseConfig& config);

class PolicyTable {
 public:
  // The first policy is the default. INVALID_ARGUMENT for none or more than four, a bad or repeated
  // name, a part without numbers it needs, numbers outside the limit table.
  static absl::StatusOr<PolicyTable> Create(std::vector<v1::SparsityPolicy> declared);

  // INVALID_ARGUMENT for an unknown name or an override that sets a selector. REQUIRES: the choice
  // passed CheckLimits.
  absl::StatusOr<ResolvedPolicy> Resolve(const v1::PolicyChoice& choice) const;

  // FAILED_PRECONDITION, with the flags that would help, where positions are compact and no policy
  // can serve a context of `tokens`. As of CheckTrainedWindow.
  absl::Status CheckContext(int64_t tokens, int64_t trained_window) const;

  const std::vector<v1::SparsityPolicy>& declared() const { return declared_; }

 private:
  explicit PolicyTable(std::vector<v1::SparsityPolicy> declared) : declared_(std::move(declared)) {}

  std::vector<v1::SparsityPolicy> declared_;
};

}  // namespace kvasir::coordinator
