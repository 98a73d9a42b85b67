// How one API tells its answers in JSON: the seam between an answer, which collects tokens, and the
// APIs (completions, chat). A format belongs to one answer and one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "nlohmann/json.hpp"

#include "proto/finish_numbers.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Tokens that a client is told, and the end of the choice when they are its last.
struct ToldTokens {
  size_t choice = 0;
  const v1::Tokens& tokens;
  const v1::Finish* finish = nullptr;  // null: more follow
  // Log probabilities of the prompt, in a whole answer that was asked for them.
  const v1::PromptLogprobs* prompt = nullptr;
};

// How one answer is called, whatever its form.
struct AnswerName {
  std::string id;
  std::string model;
  int64_t created = 0;  // Unix time, s
};

// Returns the members that every chunk and every whole answer has.
inline nlohmann::json AnswerHead(const char* object, const AnswerName& name) {
  return {{"id", name.id}, {"object", object}, {"created", name.created}, {"model", name.model}};
}

class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;

  // Members of a chunk of a stream and of a whole answer, except choices and usage.
  virtual nlohmann::json ChunkHead() const = 0;
  virtual nlohmann::json WholeHead() const = 0;
  // The element of `choices` that a stream sends for a choice before its first token, if any.
  virtual std::optional<nlohmann::json> Opening(size_t choice) = 0;
  // That of log probabilities of the prompt, which come in parts before the first token. None for
  // an API that never asks for them.
  virtual std::optional<nlohmann::json> ChunkPrompt(size_t choice,
                                                    const v1::PromptLogprobs& logprobs) {
    static_cast<void>(choice), static_cast<void>(logprobs);
    return std::nullopt;
  }
  virtual nlohmann::json ChunkChoice(const ToldTokens& told) = 0;
  virtual nlohmann::json WholeChoice(const ToldTokens& told) = 0;
};

// "stop" or "length", null before the end.
inline nlohmann::json FinishReasonJson(const v1::Finish* finish) {
  if (finish == nullptr) return nullptr;
  return proto::FinishReasonName(finish->reason());
}

// The stop string or stop token that ended the choice, as vLLM tells it; null for others.
inline nlohmann::json StopReasonJson(const v1::Finish* finish) {
  if (finish == nullptr) return nullptr;
  if (finish->has_matched_stop_str()) return finish->matched_stop_str();
  if (finish->has_matched_token_id()) return finish->matched_token_id();
  return nullptr;
}

}  // namespace kvasir::coordinator
