// The policies of attention: declared policies, a request's choice among them, and the canonical
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
  uint32_t index = 0;  // in the declared policies
  v1::AttentionPolicy prefill;
  v1::AttentionPolicy decode;
  uint32_t tail_tokens = 0;
};

// Returns whether a selector or a terminator may leave anything out.
bool IsSparse(const v1::AttentionPolicy& policy);

// Returns bytes that are equal if and only if attention under two policies is equal: the methods,
// the numbers that they read, the budget in the selector's groups, and the contract of quality.
std::string CanonicalBytes(const v1::AttentionPolicy& policy);

// Returns the first position whose KV would differ if the prompt were longer: from there on
// attention follows the decode part of the policy. INT64_MAX when both parts are dense. Blocks that
// reach beyond it are never shared with other requests, nor replaced by cached blocks.
int64_t PrivateBegin(const ResolvedPolicy& policy, int64_t prompt_tokens);

// For compact positions: INVALID_ARGUMENT unless every query of a sequence of `tokens` attends to
// at most `trained_window` tokens. `trained_window` is 0 when positions are not compact.
absl::Status CheckTrainedWindow(const ResolvedPolicy& policy, int64_t tokens,
                                int64_t trained_window);

// For compact positions: limits the budget that a contract of quality may widen to, so that at most
// `trained_window` tokens are attended to. `trained_window` is 0 when positions are not compact.
void LimitWidening(int64_t trained_window, v1::AttentionPolicy& policy);

// Returns the policy of the flags of `kvasir serve`, named "default".
v1::SparsityPolicy PolicyFromFlags(const v1::SparseConfig& config);

class PolicyTable {
 public:
  // The first policy is the default. INVALID_ARGUMENT for none or more than four, for a bad or
  // repeated name, for a part without a number that it needs, and for a number outside its limits.
  static absl::StatusOr<PolicyTable> Create(std::vector<v1::SparsityPolicy> declared);

  // Returns the chosen policy. INVALID_ARGUMENT for an unknown name and for an override that sets a
  // selector. REQUIRES: the choice passed CheckLimits.
  absl::StatusOr<ResolvedPolicy> Resolve(const v1::PolicyChoice& choice) const;

  // For compact positions (see CheckTrainedWindow): FAILED_PRECONDITION, with the flags that would
  // help, when no policy can serve a context of `tokens`.
  absl::Status CheckContext(int64_t tokens, int64_t trained_window) const;

  const std::vector<v1::SparsityPolicy>& declared() const { return declared_; }

 private:
  explicit PolicyTable(std::vector<v1::SparsityPolicy> declared) : declared_(std::move(declared)) {}

  std::vector<v1::SparsityPolicy> declared_;
};

}  // namespace kvasir::coordinator
