#include "coordinator/vllm/vllm_answer.h"

#include <utility>

#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

namespace engine = ::vllm::grpc::engine;

void AddLogprobs(const v1::Tokens& tokens, engine::OutputLogProbs& to) {
  for (int i = 0; i < tokens.logprobs_size(); ++i) {
    const v1::TokenLogprobs& logprobs = tokens.logprobs(i);
    to.add_token_logprobs(logprobs.logprob());
    to.add_token_ids(tokens.token_ids(i));
    if (logprobs.top().empty()) continue;
    engine::TopLogProbs& top = *to.add_top_logprobs();
    for (const v1::TopLogprob& entry : logprobs.top()) {
      top.add_values(entry.logprob());
      top.add_token_ids(entry.token_id());
    }
  }
}

}  // namespace

std::optional<engine::GenerateResponse> VllmAnswer::Take(const v1::GenerateResponse& response) {
  switch (response.event_case()) {
    case v1::GenerateResponse::kProgress:
      prompt_tokens_ = response.progress().prompt_tokens();
      cached_tokens_ = response.progress().cached_tokens();
      return std::nullopt;
    case v1::GenerateResponse::kPromptLogprobs:
      TakeScores(response.prompt_logprobs());
      return std::nullopt;
    case v1::GenerateResponse::kTokens:
      if (form_ == Form::kChunks) return Chunk(response.tokens());
      whole_.mutable_output_ids()->MergeFrom(response.tokens().token_ids());
      if (!response.tokens().logprobs().empty()) {
        AddLogprobs(response.tokens(), *whole_.mutable_output_logprobs());
      }
      return std::nullopt;
    case v1::GenerateResponse::kFinish:
      return Complete(response.finish());
    case v1::GenerateResponse::EVENT_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

void VllmAnswer::TakeScores(const v1::PromptLogprobs& scores) {
  if (!scores_.has_value()) scores_.emplace();
  if (scores.has_first_token_id()) {
    scores_->add_token_logprobs();
    scores_->add_token_ids(scores.first_token_id());
    if (scores.top_count() > 0) scores_->add_top_logprobs();
  }
  const auto count = static_cast<int>(scores.top_count());
  for (int i = 0; i < scores.token_ids_size(); ++i) {
    scores_->add_token_logprobs()->set_value(scores.logprobs(i));
    scores_->add_token_ids(scores.token_ids(i));
    if (count == 0) continue;
    engine::TopLogProbs& top = *scores_->add_top_logprobs();
    for (int n = i * count; n < (i + 1) * count; ++n) {
      top.add_values(scores.top_logprobs(n));
      top.add_token_ids(scores.top_token_ids(n));
    }
  }
}

engine::GenerateResponse VllmAnswer::Chunk(const v1::Tokens& tokens) {
  engine::GenerateResponse response;
  engine::GenerateStreamChunk& chunk = *response.mutable_chunk();
  *chunk.mutable_token_ids() = tokens.token_ids();
  chunk.set_prompt_tokens(prompt_tokens_);
  chunk.set_completion_tokens(static_cast<uint32_t>(tokens.token_ids_size()));
  chunk.set_cached_tokens(cached_tokens_);
  if (!tokens.logprobs().empty()) AddLogprobs(tokens, *chunk.mutable_output_logprobs());
  if (scores_.has_value()) *chunk.mutable_input_logprobs() = *std::exchange(scores_, {});
  return response;
}

engine::GenerateResponse VllmAnswer::Complete(const v1::Finish& finish) {
  engine::GenerateResponse response;
  engine::GenerateComplete& complete = *response.mutable_complete();
  complete = std::move(whole_);
  complete.set_finish_reason(proto::FinishReasonName(finish.reason()));
  const v1::Usage& usage = finish.usage();
  complete.set_prompt_tokens(usage.prompt_tokens());
  complete.set_completion_tokens(usage.completion_tokens());
  complete.set_cached_tokens(static_cast<uint32_t>(proto::TokensOfAllTiers(usage.cached_tokens())));
  if (scores_.has_value()) *complete.mutable_input_logprobs() = *std::exchange(scores_, {});
  if (finish.has_matched_token_id()) complete.set_matched_token_id(finish.matched_token_id());
  if (finish.has_matched_stop_str()) complete.set_matched_stop_str(finish.matched_stop_str());
  return response;
}

}  // namespace kvasir::coordinator
