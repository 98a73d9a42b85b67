// Turns a client's request into the request that runs: limits, tokens, sampling and policy are
// checked and resolved, and nothing is left to defaults. Hidden: the order of checks, so that
// nothing is allocated or computed from an unchecked number. Called by the service. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "coordinator/chat/model_chat.h"
#include "coordinator/policy/policy.h"
#include "coordinator/tokenizer/incremental_decoder.h"
#include "coordinator/tokenizer/stop_matcher.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// The served model, against which requests are checked.
struct ServedModel {
  const Tokenizer& tokenizer;
  const ModelChat& chat;
  const PolicyTable& policies;
  const std::vector<int32_t>& eos_token_ids;
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
  int64_t trained_window = 0;  // as in v1::Ready
};

// The context that a request names; empty: none.
struct GivenContext {
  absl::Span<const int32_t> tokens = {};     // precede those of the input
  const v1::PolicyChoice* policy = nullptr;  // where the request chooses none
};

struct ParsedRequest {
  std::vector<int32_t> prompt = {};
  int64_t max_tokens = 0;
  v1::RowSampling sampling = {};
  bool wants_prompt_logprobs = false;
  bool wants_token_texts = false;  // beside logprobs
  ResolvedPolicy policy = {};
  std::vector<std::string> stop_strings = {};
  StopMatcher::StopText stop_text = StopMatcher::StopText::kExclude;
  SpecialTokens special_tokens = SpecialTokens::kSkip;
  bool is_conversation = false;  // the chat template made the prompt
  // Tokens of the answer that the client has. All but the last need not be computed.
  std::vector<int32_t> told = {};
};

// Returns the options for tokenizing the text of a GenerateRequest or a TokenizeRequest.
template <typename TextRequest>
EncodeOptions EncodingOf(const TextRequest& request, int64_t max_tokens) {
  const bool parses = !request.has_parse_special_tokens() || request.parse_special_tokens();
  return {.add_special_tokens = !request.has_add_special_tokens() || request.add_special_tokens(),
          .special_token_text = parses ? SpecialTokenText::kParse : SpecialTokenText::kPlainText,
          .max_tokens = max_tokens};
}

// Uses `seed` when the request has none. INVALID_ARGUMENT with the field, its value and its range.
absl::StatusOr<ParsedRequest> ParseRequest(const v1::GenerateRequest& request,
                                           const ServedModel& model, uint64_t seed,
                                           const GivenContext& context = {});

// Returns the tokens of the input alone, which follow `before` tokens of a context and leave room
// for an answer of `max_tokens`. REQUIRES: the request passed CheckLimits.
absl::StatusOr<std::vector<int32_t>> ParsePrompt(const v1::GenerateRequest& request,
                                                 const ServedModel& model, int64_t max_tokens,
                                                 int64_t before);

}  // namespace kvasir::coordinator
