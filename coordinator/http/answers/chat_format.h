// Answers as POST /v1/chat/completions tells them: objects "chat.completion" and
// "chat.completion.chunk". Belongs to one answer.
#pragma once

#include <optional>

#include "coordinator/http/answers/answer_format.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

class ChatFormat final : public AnswerFormat {
 public:
  ChatFormat(const Tokenizer& tokenizer, const AnswerName& name)
      : tokenizer_(tokenizer),
        chunk_head_(AnswerHead("chat.completion.chunk", name)),
        whole_head_(AnswerHead("chat.completion", name)) {}

  nlohmann::json ChunkHead() const override { return chunk_head_; }
  nlohmann::json WholeHead() const override { return whole_head_; }
  std::optional<nlohmann::json> Opening(size_t choice) override;
  nlohmann::json ChunkChoice(const ToldTokens& told) override;
  nlohmann::json WholeChoice(const ToldTokens& told) override;

 private:
  nlohmann::json Logprobs(const v1::Tokens& tokens) const;

  const Tokenizer& tokenizer_;
  const nlohmann::json chunk_head_;
  const nlohmann::json whole_head_;
};

}  // namespace kvasir::coordinator
