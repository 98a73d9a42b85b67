// Answers as POST /v1/completions tells them: objects "text_completion", with the legacy form of
// log probabilities. Belongs to one answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/http/answers/answer_format.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

struct CompletionFormatSetup {
  const Tokenizer& tokenizer;
  AnswerName name;
  size_t n = 1;                          // choices of each prompt
  std::vector<std::string> echoes = {};  // texts of the prompts, where they are told; or empty
};

class CompletionFormat final : public AnswerFormat {
 public:
  explicit CompletionFormat(CompletionFormatSetup setup);

  nlohmann::json ChunkHead() const override { return head_; }
  nlohmann::json WholeHead() const override { return head_; }
  std::optional<nlohmann::json> Opening(size_t) override { return std::nullopt; }
  std::optional<nlohmann::json> ChunkPrompt(size_t choice,
                                            const v1::PromptLogprobs& logprobs) override;
  nlohmann::json ChunkChoice(const ToldTokens& told) override;
  nlohmann::json WholeChoice(const ToldTokens& told) override;

 private:
  nlohmann::json Choice(const ToldTokens& told, const std::string& text);
  // The legacy form of log probabilities: lists with an element a token.
  struct Lists;
  void AddPrompt(size_t choice, const v1::PromptLogprobs& prompt, Lists& lists);
  void AddTokens(size_t choice, const v1::Tokens& tokens, Lists& lists);
  // Adds the token, with the most probable ones in its place.
  void AddToken(size_t choice, uint32_t id, float logprob, nlohmann::json top, Lists& lists);
  // Adds the token's text and offset, and moves the offset on.
  void AddText(size_t choice, uint32_t id, Lists& lists);

  const CompletionFormatSetup setup_;
  const nlohmann::json head_;
  std::vector<bool> echoed_;      // by choice: its prompt was told in a stream
  std::vector<int64_t> offsets_;  // by choice: characters of the tokens told
};

}  // namespace kvasir::coordinator
