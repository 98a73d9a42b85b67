#include "coordinator/http/answers/completion_format.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/http/answers/token_text.h"

namespace kvasir::coordinator {

using nlohmann::json;

struct CompletionFormat::Lists {
  json tokens = json::array();
  json token_logprobs = json::array();
  // Maps from the most probable tokens to their log probabilities, with the token itself.
  json top_logprobs = json::array();
  json text_offset = json::array();

  json Json() && {
    if (tokens.empty()) return nullptr;
    return {{"tokens", std::move(tokens)},
            {"token_logprobs", std::move(token_logprobs)},
            {"top_logprobs", std::move(top_logprobs)},
            {"text_offset", std::move(text_offset)}};
  }
};

CompletionFormat::CompletionFormat(CompletionFormatSetup setup)
    : setup_(std::move(setup)), head_(AnswerHead("text_completion", setup_.name)) {}

std::optional<json> CompletionFormat::ChunkPrompt(size_t choice,
                                                  const v1::PromptLogprobs& logprobs) {
  Lists lists;
  AddPrompt(choice, logprobs, lists);
  return json{{"index", choice},
              {"text", ""},
              {"logprobs", std::move(lists).Json()},
              {"finish_reason", nullptr},
              {"stop_reason", nullptr}};
}

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
  Lists lists;
  if (told.prompt != nullptr) AddPrompt(told.choice, *told.prompt, lists);
  if (!told.tokens.logprobs().empty()) AddTokens(told.choice, told.tokens, lists);
  return {{"index", told.choice},
          {"text", text},
          {"logprobs", std::move(lists).Json()},
          {"finish_reason", FinishReasonJson(told.finish)},
          {"stop_reason", StopReasonJson(told.finish)}};
}

void CompletionFormat::AddText(size_t choice, uint32_t id, Lists& lists) {
  if (offsets_.size() <= choice) offsets_.resize(choice + 1);
  lists.tokens.push_back(TokenText(setup_.tokenizer, id));
  lists.text_offset.push_back(offsets_[choice]);
  offsets_[choice] += TokenCharacters(setup_.tokenizer, id);
}

void CompletionFormat::AddToken(size_t choice, uint32_t id, float logprob, json top, Lists& lists) {
  AddText(choice, id, lists);
  top[lists.tokens.back().get_ref<const std::string&>()] = logprob;
  lists.token_logprobs.push_back(logprob);
  lists.top_logprobs.push_back(std::move(top));
}

void CompletionFormat::AddPrompt(size_t choice, const v1::PromptLogprobs& prompt, Lists& lists) {
  if (prompt.has_first_token_id()) {
    AddText(choice, prompt.first_token_id(), lists);
    lists.token_logprobs.push_back(nullptr);
    lists.top_logprobs.push_back(nullptr);
  }
  const auto count = static_cast<int>(prompt.top_count());
  for (int i = 0; i < prompt.token_ids_size(); ++i) {
    json top = json::object();
    for (int n = i * count; n < (i + 1) * count; ++n) {
      top.emplace(TokenText(setup_.tokenizer, prompt.top_token_ids(n)), prompt.top_logprobs(n));
    }
    AddToken(choice, prompt.token_ids(i), prompt.logprobs(i), std::move(top), lists);
  }
}

void CompletionFormat::AddTokens(size_t choice, const v1::Tokens& tokens, Lists& lists) {
  for (int i = 0; i < tokens.logprobs_size(); ++i) {
    const v1::TokenLogprobs& logprobs = tokens.logprobs(i);
    json top = json::object();
    for (const v1::TopLogprob& other : logprobs.top()) {
      top.emplace(TokenText(setup_.tokenizer, other.token_id()), other.logprob());
    }
    AddToken(choice, tokens.token_ids(i), logprobs.logprob(), std::move(top), lists);
  }
}

}  // namespace kvasir::coordinator
