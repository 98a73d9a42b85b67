#include "proto/policy_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/selector_field.h"

namespace kvasir::v1 {
namespace {

constexpr char kInterval[] = "interval", kCosine[] = "cosine", kBoth[] = "both";
constexpr char kDense[] = "dense", kWiden[] = "widen", kReport[] = "report";

// Same values as in kernels/, which this layer does not see; tests/worker/policy_check_test.cc
// compares them.
constexpr uint32_t kPageTokens = 64;
// Most intervals that a selection serves under the rule `both`.
constexpr uint32_t kIntervalsUnderBoth = 4;

// True for a selector that leaves tokens out and has no list: it reads sink and window only.
bool OnlySinkAndWindow(const AttentionPolicy& policy) {
  return Selects(policy) && !FactsOf(policy).lists();
}

// Returns the number of steps that a list serves: tokens that leave the window meanwhile must have
// been among its candidates, unless the least window holds them. Under `cosine` nothing leaves it.
uint32_t ServedSteps(const AttentionPolicy& policy) {
  const ReusePolicy& reuse = policy.reuse();
  if (FactsOf(policy).window_holds_reach() || reuse.rule() == kCosine) return 1;
  const uint32_t intervals = reuse.rule() == kBoth ? kIntervalsUnderBoth : 1;
  return std::min<uint32_t>(intervals * reuse.interval(), kPageTokens);
}

absl::Status CheckTerminator(const std::string& where, const AttentionPolicy& part) {
  if (!Terminates(part)) {
    if (part.patience() == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".patience is set, but there is no terminator; set art"));
  }
  const std::string name = absl::StrCat(where, ".", TerminatorName(part));
  if (OnlySinkAndWindow(part)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is set; ", SelectorName(part),
                     " leaves nothing between sink and window to stop at"));
  }
  if (part.quality().min_mass() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " is set beside quality.min_mass; a contract is about what is selected, and ",
        TerminatorName(part), " leaves of that unread what it likes: drop one"));
  }
  if (part.window_tokens() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".window_tokens is 0; ", TerminatorName(part),
                     " needs a window of at least 1 token, the query's own"));
  }
  if (part.art().order() == "importance" && !Selects(part)) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ".order is importance; all gives no scores: use recency, or a selector that lists"));
  }
  return absl::OkStatus();
}

absl::Status CheckLayerBudgets(const std::string& where, const AttentionPolicy& part) {
  if (part.layer_budgets_size() > 0 && !FactsOf(part).lists()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".layer_budgets are set; ",
                     Selects(part) ? SelectorName(part) : "a policy that attends to everything",
                     " has no budget: drop them, or choose a selector that has one"));
  }
  int64_t next = 0;
  for (int i = 0; i < part.layer_budgets_size(); ++i) {
    const LayerBudget& layers = part.layer_budgets(i);
    if (layers.first_layer() < next || layers.last_layer() < layers.first_layer()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ".layer_budgets[", i, "] are of layers ", layers.first_layer(),
                       " to ", layers.last_layer(), ", where the first may be ", next,
                       ", and the last is not before it: name layers in ascending order, once"));
    }
    next = int64_t{layers.last_layer()} + 1;
  }
  return absl::OkStatus();
}

absl::Status CheckReuse(const std::string& where, const AttentionPolicy& policy) {
  const ReusePolicy& reuse = policy.reuse();
  if (reuse.rule().empty()) {
    if (!HasNumbers(reuse)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        where, ".reuse has numbers and no rule; the rules are interval, cosine, both"));
  }
  if (reuse.rule() != kInterval && reuse.rule() != kCosine && reuse.rule() != kBoth) {
    return absl::InvalidArgumentError(absl::StrCat(where, ".reuse.rule is '", reuse.rule(),
                                                   "'; the rules are interval, cosine, both"));
  }
  if (!FactsOf(policy).lists()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".reuse is set; only what a selector chose can be used again"));
  }
  return absl::OkStatus();
}

absl::Status CheckWidening(const std::string& where, const AttentionPolicy& policy) {
  const QualityPolicy& quality = policy.quality();
  if (quality.on_violation() != kWiden) {
    if (quality.max_budget_tokens() == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".quality.max_budget_tokens is set and on_violation is ",
                     quality.on_violation(), "; only widen changes the budget"));
  }
  if (OnlySinkAndWindow(policy)) {
    return absl::InvalidArgumentError(absl::StrCat(where, ".quality.on_violation is widen; ",
                                                   SelectorName(policy),
                                                   " has no budget: choose dense or report"));
  }
  const uint32_t budget = LargestLayerBudget(policy);
  if (quality.max_budget_tokens() == 0 || quality.max_budget_tokens() >= budget) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(where, ".quality.max_budget_tokens is ", quality.max_budget_tokens(),
                   ", less than the token_budget of ", budget, " to begin with"));
}

absl::Status CheckQuality(const std::string& where, const AttentionPolicy& policy) {
  const QualityPolicy& quality = policy.quality();
  if (!IsSet(quality)) return absl::OkStatus();
  if (quality.min_mass() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".quality has no min_mass; set what attention is to keep"));
  }
  if (!Selects(policy)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".quality is set; a policy that attends to everything keeps it all"));
  }
  const std::string& action = quality.on_violation();
  if (action != kDense && action != kWiden && action != kReport) {
    return absl::InvalidArgumentError(absl::StrCat(where, ".quality.on_violation is '", action,
                                                   "'; there are dense, widen, report"));
  }
  return CheckWidening(where, policy);
}

}  // namespace

bool Selects(const AttentionPolicy& policy) {
  return policy.selector_case() != AttentionPolicy::SELECTOR_NOT_SET && !policy.has_all();
}

bool Terminates(const AttentionPolicy& policy) {
  return policy.terminator_case() != AttentionPolicy::TERMINATOR_NOT_SET;
}

bool HasNumbers(const ReusePolicy& reuse) {
  return reuse.interval() != 0 || reuse.theta() != 0 || reuse.theta_force() != 0 ||
         reuse.max_age() != 0;
}

bool IsSet(const QualityPolicy& quality) {
  return quality.min_mass() != 0 || !quality.on_violation().empty() ||
         quality.max_budget_tokens() != 0;
}

uint32_t LargestLayerBudget(const AttentionPolicy& policy) {
  uint32_t largest = policy.token_budget();
  for (const LayerBudget& layers : policy.layer_budgets()) {
    largest = std::max(largest, layers.token_budget());
  }
  return largest;
}

absl::Status CheckWindow(const std::string& where, const AttentionPolicy& policy) {
  if (!Selects(policy)) return absl::OkStatus();
  const uint32_t least = FactsOf(policy).min_window_tokens();
  if (policy.window_tokens() < least) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ".window_tokens is ", policy.window_tokens(), "; ", SelectorName(policy),
        " needs a window of at least ", least, " tokens, the query's own included"));
  }
  if (policy.reuse().rule().empty()) return absl::OkStatus();
  const uint32_t steps = ServedSteps(policy);
  if (policy.window_tokens() >= steps) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      where, ".window_tokens is ", policy.window_tokens(), "; a selection that serves ", steps,
      " steps needs a window of at least ", steps, " tokens; shorten reuse.interval"));
}

absl::Status CheckPolicyPart(const std::string& where, const AttentionPolicy& part) {
  if (FactsOf(part).lists() && part.token_budget() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, ".token_budget is not set; ",
                                                   SelectorName(part),
                                                   " needs the tokens it may select"));
  }
  if (part.top_p() != 0 && !FactsOf(part).lists()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".top_p is set; only what a selector chose can be pruned"));
  }
  KVASIR_RETURN_IF_ERROR(CheckLayerBudgets(where, part));
  KVASIR_RETURN_IF_ERROR(CheckQuality(where, part));
  KVASIR_RETURN_IF_ERROR(CheckReuse(where, part));
  KVASIR_RETURN_IF_ERROR(CheckWindow(where, part));
  return CheckTerminator(where, part);
}

}  // namespace kvasir::v1
