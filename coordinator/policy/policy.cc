#include "coordinator/policy/policy.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "coordinator/policy/limits.h"
#include "coordinator/policy/quality_policy.h"
#include "coordinator/policy/reuse_policy.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/block.h"
#include "proto/policy_check.h"
#include "proto/selector_field.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMaxPolicies = 4;
constexpr uint32_t kDefaultTailTokens = 64;
constexpr uint32_t kDefaultPatience = 5;

// Returns the number of tokens that a selector chooses together; budgets are rounded up to it.
int64_t ChunkTokens(const v1::AttentionPolicy& policy) {
  return v1::FactsOf(policy).chunk_tokens();
}

absl::Status CheckNothingOfDecoding(const std::string& where, const v1::AttentionPolicy& part) {
  const auto refuse = [&](absl::string_view field, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(where, ".", field, " is set; ", why));
  };
  if (part.top_p() != 0) return refuse("top_p", "only decoding is pruned");
  if (!part.reuse().rule().empty()) return refuse("reuse", "only decoding reuses selections");
  if (part.has_quality()) return refuse("quality", "it is decoding that it is about");
  if (Terminates(part)) return refuse(v1::TerminatorName(part), "only decoding stops early");
  return absl::OkStatus();
}

// Returns `budget` tokens in the selector's groups, rounded up.
int64_t BudgetBlocks(const v1::AttentionPolicy& policy, uint32_t budget) {
  const int64_t block = ChunkTokens(policy);
  return (int64_t{budget} + block - 1) / block;
}

// Returns the most tokens that are selected in any layer.
int64_t SelectedTokens(const v1::AttentionPolicy& policy) {
  if (!v1::FactsOf(policy).lists()) return 0;
  return BudgetBlocks(policy, LargestLayerBudget(policy)) * ChunkTokens(policy);
}

// Checks that `rows` queries that share a selection attend to no more than the trained window.
absl::Status CheckPartFits(absl::string_view part, const v1::AttentionPolicy& policy, int64_t rows,
                           int64_t tokens, int64_t trained_window) {
  if (!Selects(policy) || policy.dense_layers() > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prompt and answer may have ", tokens, " tokens and the model was trained for ",
        trained_window, ": ", part, " must be sparse in all layers, but ",
        Selects(policy) ? absl::StrCat("the first ", policy.dense_layers(), " attend")
                        : std::string("the policy attends"),
        " to everything; choose another policy"));
  }
  const int64_t attended =
      int64_t{policy.sink_tokens()} + SelectedTokens(policy) + policy.window_tokens() + rows - 1;
  if (attended <= trained_window) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(part, " attends to ", attended, " tokens (sink ", policy.sink_tokens(),
                   ", selected ", SelectedTokens(policy), ", window ", policy.window_tokens(),
                   " of each of ", rows, " queries), more than the ", trained_window,
                   " the model was trained for; lower token_budget or window_tokens"));
}

// Returns the number of queries whose windows a decode step attends to. Under `cosine` the window
// grows in every step that a list may serve.
int64_t WindowQueries(const v1::AttentionPolicy& decode) {
  return decode.reuse().rule() == "cosine" ? kvstore::kBlockTokens : 1;
}

absl::Status Override(const std::string& where, const v1::AttentionPolicy& overrides,
                      v1::AttentionPolicy& policy) {
  if (overrides.selector_case() != v1::AttentionPolicy::SELECTOR_NOT_SET || Terminates(overrides)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " sets a ", Terminates(overrides) ? "terminator" : "selector",
                     "; a request may override numbers only: choose a "
                     "declared policy by policy.name instead"));
  }
  if (overrides.sink_tokens() != 0) policy.set_sink_tokens(overrides.sink_tokens());
  if (overrides.window_tokens() != 0) policy.set_window_tokens(overrides.window_tokens());
  if (overrides.token_budget() != 0) policy.set_token_budget(overrides.token_budget());
  if (overrides.dense_layers() != 0) policy.set_dense_layers(overrides.dense_layers());
  if (overrides.layer_budgets_size() > 0) {
    *policy.mutable_layer_budgets() = overrides.layer_budgets();
  }
  if (overrides.top_p() != 0 && policy.top_p() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " sets top_p, but the policy declares no pruning"));
  }
  if (overrides.top_p() != 0) policy.set_top_p(overrides.top_p());
  KVASIR_RETURN_IF_ERROR(OverrideReuse(where, overrides.reuse(), policy));
  KVASIR_RETURN_IF_ERROR(OverrideQuality(where, overrides.quality(), policy));
  if (overrides.patience() != 0 && !Terminates(policy)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " sets patience, but the policy declares no terminator"));
  }
  if (overrides.patience() != 0) policy.set_patience(overrides.patience());
  return v1::CheckPolicyPart(where, policy);
}

}  // namespace

bool IsSparse(const v1::AttentionPolicy& policy) { return Selects(policy) || Terminates(policy); }

std::string CanonicalBytes(const v1::AttentionPolicy& policy) {
  if (!IsSparse(policy)) return "all";
  const std::string ranges =
      absl::StrCat(v1::SelectorName(policy), ";sink=", policy.sink_tokens(),
                   ";window=", policy.window_tokens(), ";dense_layers=", policy.dense_layers());
  if (Selects(policy) && !v1::FactsOf(policy).lists()) return ranges + CanonicalQuality(policy);
  std::string bytes = ranges;
  if (Selects(policy)) {
    const int64_t blocks = BudgetBlocks(policy, policy.token_budget());
    absl::StrAppend(&bytes, ";blocks=", blocks);
    for (const v1::LayerBudget& layers : policy.layer_budgets()) {
      const int64_t own = BudgetBlocks(policy, layers.token_budget());
      if (own == blocks) continue;
      absl::StrAppend(&bytes, ";layers", layers.first_layer(), "-", layers.last_layer(), "=", own);
    }
  }
  for (const auto& [name, value] : v1::SelectorFields(policy)) {
    absl::StrAppend(&bytes, ";", name, "=", value);
  }
  // All bits: nearby shares are not equal.
  if (policy.top_p() != 0) {
    absl::StrAppend(&bytes, ";top_p=", absl::Hex(std::bit_cast<uint32_t>(policy.top_p())));
  }
  absl::StrAppend(&bytes, CanonicalReuse(policy), CanonicalQuality(policy));
  if (Terminates(policy)) {
    absl::StrAppend(&bytes, ";", v1::TerminatorName(policy), ";patience=", policy.patience());
    for (const auto& [name, value] : v1::TerminatorFields(policy)) {
      absl::StrAppend(&bytes, ";", name, "=", value);
    }
  }
  return bytes;
}

int64_t PrivateBegin(const ResolvedPolicy& policy, int64_t prompt_tokens) {
  if (IsSparse(policy.decode)) {
    return std::max<int64_t>(0, prompt_tokens - int64_t{policy.tail_tokens});
  }
  // A prompt is read in query tiles of 64 tokens, an answer token by token. So even the same
  // selector finds other tokens, except `all`.
  return IsSparse(policy.prefill) ? prompt_tokens : std::numeric_limits<int64_t>::max();
}

absl::Status CheckTrainedWindow(const ResolvedPolicy& policy, int64_t tokens,
                                int64_t trained_window) {
  if (trained_window == 0 || tokens <= trained_window) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CheckPartFits("the prefill part of the policy", policy.prefill,
                                       kvstore::kBlockTokens, tokens, trained_window));
  KVASIR_RETURN_IF_ERROR(CheckPartFits("the decode part of the policy", policy.decode,
                                       WindowQueries(policy.decode), tokens, trained_window));
  return CheckNoDenseFallback(policy.decode, trained_window);
}

void LimitWidening(int64_t trained_window, v1::AttentionPolicy& policy) {
  if (trained_window == 0 || policy.quality().on_violation() != "widen") return;
  const int64_t room = trained_window - int64_t{policy.sink_tokens()} -
                       int64_t{policy.window_tokens()} - (WindowQueries(policy) - 1);
  const int64_t block = ChunkTokens(policy);
  const auto limit = static_cast<uint32_t>(std::max<int64_t>(room / block * block, 0));
  const uint32_t wished = policy.quality().max_budget_tokens();
  const uint32_t most = wished == 0 ? limit : std::min(wished, limit);
  policy.mutable_quality()->set_max_budget_tokens(std::max(most, LargestLayerBudget(policy)));
}

v1::SparsityPolicy PolicyFromFlags(const v1::SparseConfig& config) {
  v1::SparsityPolicy policy;
  policy.set_name("default");
  policy.set_tail_tokens(config.sparse_tail_tokens());
  v1::SetSelector(config.sparse_prefill_selector(), *policy.mutable_prefill());
  v1::SetSelector(config.sparse_selector(), *policy.mutable_decode());
  for (v1::AttentionPolicy* part : {policy.mutable_prefill(), policy.mutable_decode()}) {
    part->set_sink_tokens(config.sparse_sink_tokens());
    part->set_window_tokens(config.sparse_window_tokens());
    part->set_token_budget(config.sparse_token_budget());
    part->set_dense_layers(config.sparse_dense_layers());
  }
  policy.mutable_decode()->set_top_p(static_cast<float>(config.sparse_top_p()));
  SetReuseFromFlags(config, *policy.mutable_decode());
  SetQualityFromFlags(config, *policy.mutable_decode());
  v1::SetTerminator(config.sparse_terminate(), *policy.mutable_decode());
  if (Terminates(policy.decode())) policy.mutable_decode()->set_patience(config.sparse_patience());
  return policy;
}

absl::StatusOr<PolicyTable> PolicyTable::Create(std::vector<v1::SparsityPolicy> declared) {
  if (declared.empty() || declared.size() > kMaxPolicies) {
    return absl::InvalidArgumentError(
        absl::StrCat(declared.size(), " policies are declared; a server has 1 to ", kMaxPolicies));
  }
  for (size_t i = 0; i < declared.size(); ++i) {
    v1::SparsityPolicy& policy = declared[i];
    const std::string where = absl::StrCat("policy '", policy.name(), "'");
    KVASIR_RETURN_IF_ERROR(CheckLimits(where, policy));
    KVASIR_RETURN_IF_ERROR(v1::CheckPolicyPart(absl::StrCat(where, ".prefill"), policy.prefill()));
    KVASIR_RETURN_IF_ERROR(
        CheckNothingOfDecoding(absl::StrCat(where, ".prefill"), policy.prefill()));
    SetReuseDefaults(*policy.mutable_decode());
    SetQualityDefaults(*policy.mutable_decode());
    KVASIR_RETURN_IF_ERROR(v1::CheckPolicyPart(absl::StrCat(where, ".decode"), policy.decode()));
    if (!policy.has_tail_tokens()) policy.set_tail_tokens(kDefaultTailTokens);
    for (v1::AttentionPolicy* part : {policy.mutable_prefill(), policy.mutable_decode()}) {
      if (!Selects(*part)) part->mutable_all();
    }
    if (Terminates(policy.decode()) && policy.decode().patience() == 0) {
      policy.mutable_decode()->set_patience(kDefaultPatience);
    }
    for (size_t j = 0; j < i; ++j) {
      if (declared[j].name() == policy.name()) {
        return absl::InvalidArgumentError(absl::StrCat(where, " is declared twice"));
      }
    }
  }
  return PolicyTable(std::move(declared));
}

absl::StatusOr<ResolvedPolicy> PolicyTable::Resolve(const v1::PolicyChoice& choice) const {
  const auto it = std::find_if(declared_.begin(), declared_.end(), [&](const auto& policy) {
    return choice.name().empty() || policy.name() == choice.name();
  });
  if (it == declared_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "policy.name is '", choice.name(), "'; this server declares ",
        absl::StrJoin(declared_, ", ", [](std::string* out, const v1::SparsityPolicy& policy) {
          absl::StrAppend(out, policy.name());
        })));
  }
  ResolvedPolicy resolved = {.index = static_cast<uint32_t>(it - declared_.begin()),
                             .prefill = it->prefill(),
                             .decode = it->decode(),
                             .tail_tokens = IsSparse(it->decode()) ? it->tail_tokens() : 0};
  KVASIR_RETURN_IF_ERROR(
      Override("policy.prefill_overrides", choice.prefill_overrides(), resolved.prefill));
  KVASIR_RETURN_IF_ERROR(
      Override("policy.decode_overrides", choice.decode_overrides(), resolved.decode));
  return resolved;
}

absl::Status PolicyTable::CheckContext(int64_t tokens, int64_t trained_window) const {
  absl::Status first;
  for (const v1::SparsityPolicy& policy : declared_) {
    v1::PolicyChoice choice;
    choice.set_name(policy.name());
    KVASIR_ASSIGN_OR_RETURN(const ResolvedPolicy resolved, Resolve(choice));
    const absl::Status fits = CheckTrainedWindow(resolved, tokens, trained_window);
    if (fits.ok()) return fits;
    if (first.ok()) first = fits;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "no policy can serve the context of ", tokens, " tokens: ", first.message(),
      " (--sparse-selector and --sparse-prefill-selector, their numbers, or --policies), or lower "
      "--max-model-len to ",
      trained_window));
}

}  // namespace kvasir::coordinator
