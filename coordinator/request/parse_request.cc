#include "coordinator/request/parse_request.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "coordinator/policy/limits.h"
#include "coordinator/request/chat_prompt.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr uint32_t kDefaultMaxTokens = 16;

absl::Status CheckTokenIds(absl::string_view field,
                           const google::protobuf::RepeatedField<uint32_t>& ids,
                           int64_t vocab_size) {
  for (int i = 0; i < ids.size(); ++i) {
    if (int64_t{ids[i]} < vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        field, "[", i, "] is ", ids[i], "; the model's tokens are [0, ", vocab_size, ")"));
  }
  return absl::OkStatus();
}

// Converts the field `field`, text or chat, to tokens.
absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view field,
                                            const v1::GenerateRequest& request,
                                            const ServedModel& model, int64_t max_tokens,
                                            int64_t before) {
  const bool is_empty = request.has_text() && request.text().empty();
  KVASIR_RETURN_IF_ERROR(
      CheckPromptLength(before + (is_empty ? 0 : 1), max_tokens, model.max_model_len));
  const int64_t most = model.max_model_len - max_tokens - before;
  EncodeOptions encoding = EncodingOf(request, most);
  if (before > 0 && !request.has_add_special_tokens()) encoding.add_special_tokens = false;
  absl::StatusOr<std::vector<int32_t>> ids =
      request.has_chat() ? EncodeChat(request.chat(), model.chat, model.tokenizer, most)
                         : model.tokenizer.Encode(request.text(), encoding);
  if (!ids.ok()) {
    return absl::Status(
        ids.status().code(),
        absl::StrCat(field, ": ", ids.status().message(), " (the context has ", model.max_model_len,
                     " tokens, sampling.max_tokens is ", max_tokens, ")"));
  }
  const auto outside =
      std::find_if(ids->begin(), ids->end(), [&](int32_t id) { return id >= model.vocab_size; });
  if (outside != ids->end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, ": it contains token ", *outside, ", which the tokenizer knows and the model, with ",
        model.vocab_size, " tokens, does not"));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckPromptLength(before + std::ssize(*ids), max_tokens, model.max_model_len));
  return ids;
}

absl::Status CheckNothingOfText(absl::string_view field, const v1::GenerateRequest& request) {
  if (!request.has_add_special_tokens() && !request.has_parse_special_tokens()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      request.has_add_special_tokens() ? "add_special_tokens" : "parse_special_tokens",
      " is set beside ", field, "; it says how text becomes tokens: drop it, or send text"));
}

// Returns the biases sorted by token, each token once.
absl::StatusOr<std::vector<v1::LogitBias>> ResolveBiases(const v1::SamplingParams& params,
                                                         int64_t vocab_size) {
  std::vector<v1::LogitBias> biases(params.logit_bias().begin(), params.logit_bias().end());
  std::sort(biases.begin(), biases.end(), [](const v1::LogitBias& a, const v1::LogitBias& b) {
    return a.token_id() < b.token_id();
  });
  for (size_t i = 0; i < biases.size(); ++i) {
    const uint32_t token = biases[i].token_id();
    if (int64_t{token} >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("sampling.logit_bias names token ", token,
                                                     "; the model's tokens are [0, ", vocab_size,
                                                     ")"));
    }
    if (i > 0 && biases[i - 1].token_id() == token) {
      return absl::InvalidArgumentError(
          absl::StrCat("sampling.logit_bias names token ", token, " twice"));
    }
  }
  return biases;
}

v1::RowSampling ResolveSampling(const v1::SamplingParams& params, const ServedModel& model,
                                uint64_t seed) {
  v1::RowSampling sampling;
  sampling.set_temperature(params.has_temperature() ? params.temperature() : 1.0f);
  sampling.set_top_p(params.has_top_p() ? params.top_p() : 1.0f);
  sampling.set_top_k(params.top_k());
  sampling.set_seed(params.has_seed() ? params.seed() : seed);
  sampling.set_min_tokens(params.min_tokens());
  sampling.set_min_p(params.min_p());
  sampling.set_repetition_penalty(params.has_repetition_penalty() ? params.repetition_penalty()
                                                                  : 1.0f);
  sampling.set_frequency_penalty(params.frequency_penalty());
  sampling.set_presence_penalty(params.presence_penalty());
  if (params.has_logprobs()) sampling.set_logprobs(params.logprobs());
  sampling.set_prompt_logprobs(params.prompt_logprobs());
  std::vector<uint32_t> stops(params.stop_token_ids().begin(), params.stop_token_ids().end());
  if (!params.ignore_eos()) {
    for (int32_t eos : model.eos_token_ids) stops.push_back(static_cast<uint32_t>(eos));
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  sampling.mutable_stop_token_ids()->Assign(stops.begin(), stops.end());
  return sampling;
}

// Takes over what the client has of the answer.
absl::Status ParseResume(const v1::GenerateRequest& request, int64_t vocab_size,
                         ParsedRequest& parsed) {
  const auto& ids = request.resume().token_ids();
  KVASIR_RETURN_IF_ERROR(CheckTokenIds("resume.token_ids", ids, vocab_size));
  if (int64_t{ids.size()} > parsed.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("resume.token_ids has ", ids.size(),
                     " tokens; sampling.max_tokens, which counts them, is ", parsed.max_tokens));
  }
  if (parsed.sampling.temperature() != 0 && !request.sampling().has_seed()) {
    return absl::InvalidArgumentError(
        absl::StrCat("resume is set, sampling.temperature is ", parsed.sampling.temperature(),
                     " and sampling.seed is not set, so that the answer would go on with other "
                     "tokens; send the seed that began it, or ask again without resume"));
  }
  const auto& stops = parsed.sampling.stop_token_ids();
  for (int i = static_cast<int>(parsed.sampling.min_tokens()); i < ids.size() - 1; ++i) {
    if (!std::binary_search(stops.begin(), stops.end(), ids[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat("resume.token_ids[", i, "] is ", ids[i],
                                                   ", which ends the answer; drop what follows"));
  }
  parsed.told = {ids.begin(), ids.end()};
  parsed.wants_prompt_logprobs = false;  // they were told before the first token
  return absl::OkStatus();
}

// Returns the request's choice, with what it leaves to the context.
v1::PolicyChoice PolicyOf(const v1::GenerateRequest& request, const GivenContext& context) {
  const v1::PolicyChoice& own = request.policy();
  if (context.policy == nullptr || !own.name().empty() || own.has_prefill_overrides()) return own;
  v1::PolicyChoice choice = *context.policy;
  if (own.has_decode_overrides()) *choice.mutable_decode_overrides() = own.decode_overrides();
  return choice;
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ParsePrompt(const v1::GenerateRequest& request,
                                                 const ServedModel& model, int64_t max_tokens,
                                                 int64_t before) {
  switch (request.input_case()) {
    case v1::GenerateRequest::kText:
      return Encode("text", request, model, max_tokens, before);
    case v1::GenerateRequest::kChat:
      KVASIR_RETURN_IF_ERROR(CheckNothingOfText("chat", request));
      return Encode("chat", request, model, max_tokens, before);
    case v1::GenerateRequest::kTokenIds: {
      KVASIR_RETURN_IF_ERROR(CheckNothingOfText("token_ids", request));
      const auto& ids = request.token_ids().ids();
      KVASIR_RETURN_IF_ERROR(
          CheckPromptLength(before + ids.size(), max_tokens, model.max_model_len));
      KVASIR_RETURN_IF_ERROR(CheckTokenIds("token_ids.ids", ids, model.vocab_size));
      return std::vector<int32_t>(ids.begin(), ids.end());
    }
    case v1::GenerateRequest::INPUT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("none of text, chat and token_ids is set; set one of them");
}

absl::StatusOr<ParsedRequest> ParseRequest(const v1::GenerateRequest& request,
                                           const ServedModel& model, uint64_t seed,
                                           const GivenContext& context) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  const v1::SamplingParams& params = request.sampling();
  const uint32_t max_tokens = params.has_max_tokens() ? params.max_tokens() : kDefaultMaxTokens;
  if (params.min_tokens() > max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.min_tokens is ", params.min_tokens(),
                                                   "; it must be at most max_tokens, ",
                                                   max_tokens));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckTokenIds("sampling.stop_token_ids", params.stop_token_ids(), model.vocab_size));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<v1::LogitBias> biases,
                          ResolveBiases(params, model.vocab_size));
  ParsedRequest parsed;
  KVASIR_ASSIGN_OR_RETURN(parsed.policy, model.policies.Resolve(PolicyOf(request, context)));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> input,
                          ParsePrompt(request, model, max_tokens, std::ssize(context.tokens)));
  parsed.prompt.reserve(context.tokens.size() + input.size());
  parsed.prompt.assign(context.tokens.begin(), context.tokens.end());
  parsed.prompt.insert(parsed.prompt.end(), input.begin(), input.end());
  KVASIR_RETURN_IF_ERROR(CheckTrainedWindow(parsed.policy,
                                            static_cast<int64_t>(parsed.prompt.size()) + max_tokens,
                                            model.trained_window));
  LimitWidening(model.trained_window, parsed.policy.decode);
  parsed.max_tokens = max_tokens;
  parsed.sampling = ResolveSampling(params, model, seed);
  parsed.wants_prompt_logprobs = params.has_prompt_logprobs();
  parsed.wants_token_texts = params.logprobs_text();
  parsed.is_conversation = request.has_chat();
  parsed.sampling.mutable_logit_bias()->Assign(biases.begin(), biases.end());
  parsed.stop_strings = {params.stop().begin(), params.stop().end()};
  if (params.include_stop_str_in_output()) parsed.stop_text = StopMatcher::StopText::kInclude;
  if (params.has_skip_special_tokens() && !params.skip_special_tokens()) {
    parsed.special_tokens = SpecialTokens::kKeep;
  }
  if (request.has_resume()) {
    KVASIR_RETURN_IF_ERROR(ParseResume(request, model.vocab_size, parsed));
  }
  return parsed;
}

}  // namespace kvasir::coordinator
