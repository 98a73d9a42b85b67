#include "coordinator/vllm/vllm_request.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

namespace engine = ::vllm::grpc::engine;

absl::Status Lacks(absl::string_view field, absl::string_view instead) {
  return absl::UnimplementedError(
      absl::StrCat(field, " is set, which this server does not have; ", instead));
}

// Returns the name of the constraint that is set; empty when none is.
absl::string_view ConstraintOf(const engine::SamplingParams& params) {
  const auto& descriptor = *engine::SamplingParams::descriptor();
  const auto* field = descriptor.FindFieldByNumber(params.constraint_case());
  return field == nullptr ? absl::string_view() : absl::string_view(field->name());
}

absl::Status CheckServed(const engine::GenerateRequest& request) {
  if (request.has_mm_inputs()) return Lacks("mm_inputs", "send text or tokens");
  if (!request.extra_mm_inputs().empty()) return Lacks("extra_mm_inputs", "send text or tokens");
  if (request.has_media_refs()) return Lacks("media_refs", "send text or tokens");
  constexpr char kOneServer[] = "prompts are read where they are answered: drop it";
  if (request.has_kv_transfer_params()) return Lacks("kv_transfer_params", kOneServer);
  if (request.has_kv_transfer_params_json()) return Lacks("kv_transfer_params_json", kOneServer);
  if (request.data_parallel_rank() != 0) {
    return Lacks("data_parallel_rank", "this server is one rank: send 0 or nothing");
  }
  const engine::SamplingParams& params = request.sampling_params();
  if (params.n() > 1) {
    return Lacks("sampling_params.n", "send as many requests, which share the prompt's cached KV");
  }
  if (params.has_truncate_prompt_tokens()) {
    return Lacks("sampling_params.truncate_prompt_tokens", "send a prompt that fits");
  }
  const absl::string_view constraint = ConstraintOf(params);
  if (!constraint.empty()) {
    return Lacks(absl::StrCat("sampling_params.", constraint), "answers are not constrained");
  }
  return absl::OkStatus();
}

// Checks a number of most probable tokens before its sign is lost.
absl::Status CheckTop(absl::string_view field, int32_t top) {
  if (top == -1) {
    return absl::UnimplementedError(
        absl::StrCat(field, " is -1, the whole vocabulary; ask for at most 20"));
  }
  if (top >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", top, "; it must be in [0, 20]"));
}

absl::Status CopyLogprobs(const engine::SamplingParams& params, v1::SamplingParams& ours) {
  if (params.has_logprobs()) {
    KVASIR_RETURN_IF_ERROR(CheckTop("sampling_params.logprobs", params.logprobs()));
    ours.set_logprobs(static_cast<uint32_t>(params.logprobs()));
  }
  if (params.has_prompt_logprobs()) {
    KVASIR_RETURN_IF_ERROR(CheckTop("sampling_params.prompt_logprobs", params.prompt_logprobs()));
    ours.set_prompt_logprobs(static_cast<uint32_t>(params.prompt_logprobs()));
  }
  for (const auto& [token, bias] : params.logit_bias()) {
    if (token < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("sampling_params.logit_bias names token ", token));
    }
    v1::LogitBias& entry = *ours.add_logit_bias();
    entry.set_token_id(static_cast<uint32_t>(token));
    entry.set_bias(bias);
  }
  return absl::OkStatus();
}

void CopySampling(const engine::SamplingParams& params, v1::SamplingParams& ours) {
  if (params.has_temperature()) ours.set_temperature(params.temperature());
  if (params.top_p() != 0) ours.set_top_p(params.top_p());
  ours.set_top_k(params.top_k());
  ours.set_min_p(params.min_p());
  ours.set_frequency_penalty(params.frequency_penalty());
  ours.set_presence_penalty(params.presence_penalty());
  if (params.repetition_penalty() != 0) ours.set_repetition_penalty(params.repetition_penalty());
  ours.set_min_tokens(params.min_tokens());
  *ours.mutable_stop() = params.stop();
  *ours.mutable_stop_token_ids() = params.stop_token_ids();
  ours.set_skip_special_tokens(params.skip_special_tokens());
  ours.set_ignore_eos(params.ignore_eos());
  if (params.has_seed()) ours.set_seed(static_cast<uint64_t>(int64_t{params.seed()}));
  ours.set_include_stop_str_in_output(params.include_stop_str_in_output());
}

absl::Status CopyPrompt(const engine::GenerateRequest& request, GenerationApi& api,
                        v1::TokenIds& ids) {
  switch (request.input_case()) {
    case engine::GenerateRequest::kTokenized:
      *ids.mutable_ids() = request.tokenized().input_ids();
      return absl::OkStatus();
    case engine::GenerateRequest::kText: {
      v1::TokenizeRequest text;
      text.set_text(request.text());
      KVASIR_ASSIGN_OR_RETURN(v1::TokenizeResponse tokens, api.Tokenize(text));
      *ids.mutable_ids() = std::move(*tokens.mutable_token_ids());
      return absl::OkStatus();
    }
    case engine::GenerateRequest::INPUT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("neither tokenized nor text is set; set one of them");
}

}  // namespace

absl::StatusOr<v1::GenerateRequest> FromVllm(const engine::GenerateRequest& request,
                                             GenerationApi& api) {
  KVASIR_RETURN_IF_ERROR(CheckServed(request));
  v1::GenerateRequest ours;
  ours.set_request_id(request.request_id());
  v1::SamplingParams& sampling = *ours.mutable_sampling();
  CopySampling(request.sampling_params(), sampling);
  KVASIR_RETURN_IF_ERROR(CopyLogprobs(request.sampling_params(), sampling));
  KVASIR_RETURN_IF_ERROR(CopyPrompt(request, api, *ours.mutable_token_ids()));
  const int64_t prompt_tokens = ours.token_ids().ids_size();
  if (sampling.has_prompt_logprobs() && prompt_tokens > kMostScoredTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling_params.prompt_logprobs is set for a prompt of ", prompt_tokens,
                     " tokens; they come in one message, for at most ", kMostScoredTokens,
                     ": kvasir.v1.Generation streams those of longer prompts"));
  }
  KVASIR_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse model, api.ModelInfo());
  sampling.set_max_tokens(request.sampling_params().has_max_tokens()
                              ? request.sampling_params().max_tokens()
                              : LongestAnswer(model, prompt_tokens));
  if (sampling.has_logprobs() && !request.stream() && sampling.max_tokens() > kMostScoredTokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling_params.logprobs is set for an answer of up to ", sampling.max_tokens(),
        " tokens in one message, for at most ", kMostScoredTokens, "; set max_tokens or stream"));
  }
  return ours;
}

}  // namespace kvasir::coordinator
