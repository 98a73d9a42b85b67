// Answers as POST /v1/chat/completions tells them: objects "chat.completion" and
// "chat.completion.chunk". Belongs to one answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "coordinator/http/answers/answer_format.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

struct ChatFormatSetup {
  const Tokenizer& tokenizer;
  std::string id;
  std::string model;
  int64_t created = 0;  // Unix time, s
};

class ChatFormat final : public AnswerFormat {
 public:
  explicit ChatFormat(ChatFormatSetup setup) : setup_(std::move(setup)) {}

  nlohmann::json ChunkHead() const override { return Head("chat.completion.chunk"); }
  nlohmann::json WholeHead() const override { return Head("chat.completion"); }
  std::optional<nlohmann::json> Opening(size_t choice) override;
  nlohmann::json ChunkChoice(const ToldTokens& told) override;
  nlohmann::json WholeChoice(const ToldTokens& told) override;

 private:
  nlohmann::json Head(const char* object) const;
  nlohmann::json Logprobs(const v1::Tokens& tokens) const;

  const ChatFormatSetup setup_;
};

}  // namespace kvasir::coordinator
