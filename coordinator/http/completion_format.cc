#include "coordinator/http/completion_format.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/http/token_text.h"

namespace kvasir::coordinator {

using nlohmann::json;

CompletionFormat::CompletionFormat(CompletionFormatSetup setup)
    : setup_(std::move(setup)),
      head_({{"id", setup_.id},
             {"object", "text_completion"},
             {"created", setup_.created},
             {"model", setup_.model}}) {}

json CompletionFormat::ChunkChoice(const ToldTokens& told) {
  if (echoed_.size() <= told.choice) echoed_.resize(told.choice + 1);
  if (echoed_[told.choice]) return Choice(told, told.tokens.text());
  echoed_[told.choice] = true;
  return WholeChoice(told);
}

json CompletionFormat::WholeChoice(const ToldTokens& told) {
  if (setup_.echoes.empty()) return Choice(told, told.tokens.text());
  return Choice(told, absl::StrCat(setup_.echoes[told.choice / setup_.n], told.tokens.text()));
}

json CompletionFormat::Choice(const ToldTokens& told, const std::string& text) {
  return {{"index", told.choice},
          {"text", text},
          {"logprobs", Logprobs(told.choice, told.tokens)},
          {"finish_reason", FinishReasonJson(told.finish)},
          {"stop_reason", StopReasonJson(told.finish)}};
}

// {tokens, token_logprobs, top_logprobs, text_offset}, lists with an element a token. An element of
// top_logprobs is a map from the most probable tokens to their log probabilities, with the chosen
// token.
json CompletionFormat::Logprobs(size_t choice, const v1::Tokens& tokens) {
  if (tokens.logprobs().empty()) return nullptr;
  if (offsets_.size() <= choice) offsets_.resize(choice + 1);
  json texts = json::array();
  json chosen = json::array();
  json tops = json::array();
  json offsets = json::array();
  for (int i = 0; i < tokens.logprobs_size(); ++i) {
    const v1::TokenLogprobs& logprobs = tokens.logprobs(i);
    const uint32_t id = tokens.token_ids(i);
    const std::string text = TokenText(setup_.tokenizer, id);
    json top = json::object();
    for (const v1::TopLogprob& other : logprobs.top()) {
      top.emplace(TokenText(setup_.tokenizer, other.token_id()), other.logprob());
    }
    top[text] = logprobs.logprob();
    texts.push_back(text);
    chosen.push_back(logprobs.logprob());
    tops.push_back(std::move(top));
    offsets.push_back(offsets_[choice]);
    offsets_[choice] += TokenCharacters(setup_.tokenizer, id);
  }
  return {{"tokens", std::move(texts)},
          {"token_logprobs", std::move(chosen)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

}  // namespace kvasir::coordinator
