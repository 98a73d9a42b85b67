#include "coordinator/http/answers/chat_format.h"

#include "absl/strings/string_view.h"

#include "coordinator/http/answers/token_text.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

json TokenJson(const Tokenizer& tokenizer, uint32_t id, float logprob) {
  json bytes = json::array();
  for (const char c : tokenizer.TokenBytes(static_cast<int32_t>(id))) {
    bytes.push_back(static_cast<unsigned char>(c));
  }
  return {{"token", TokenText(tokenizer, id)}, {"logprob", logprob}, {"bytes", std::move(bytes)}};
}

}  // namespace

std::optional<json> ChatFormat::Opening(size_t choice) {
  return json{{"index", choice},
              {"delta", {{"role", "assistant"}, {"content", ""}}},
              {"logprobs", nullptr},
              {"finish_reason", nullptr}};
}

json ChatFormat::ChunkChoice(const ToldTokens& told) {
  return {{"index", told.choice},
          {"delta", {{"content", told.tokens.text()}}},
          {"logprobs", Logprobs(told.tokens)},
          {"finish_reason", FinishReasonJson(told.finish)},
          {"stop_reason", StopReasonJson(told.finish)}};
}

json ChatFormat::WholeChoice(const ToldTokens& told) {
  return {
      {"index", told.choice},
      {"message", {{"role", "assistant"}, {"content", told.tokens.text()}, {"refusal", nullptr}}},
      {"logprobs", Logprobs(told.tokens)},
      {"finish_reason", FinishReasonJson(told.finish)},
      {"stop_reason", StopReasonJson(told.finish)}};
}

json ChatFormat::Logprobs(const v1::Tokens& tokens) const {
  if (tokens.logprobs().empty()) return nullptr;
  json content = json::array();
  for (int i = 0; i < tokens.logprobs_size(); ++i) {
    const v1::TokenLogprobs& logprobs = tokens.logprobs(i);
    json token = TokenJson(tokenizer_, tokens.token_ids(i), logprobs.logprob());
    json top = json::array();
    for (const v1::TopLogprob& other : logprobs.top()) {
      top.push_back(TokenJson(tokenizer_, other.token_id(), other.logprob()));
    }
    token["top_logprobs"] = std::move(top);
    content.push_back(std::move(token));
  }
  return {{"content", std::move(content)}};
}

}  // namespace kvasir::coordinator
