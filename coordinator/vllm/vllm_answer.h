// Turns the messages of one request's answer into those of vllm.grpc.engine.VllmEngine. Holds back
// what comes in one message there: log probabilities of the prompt, and the whole answer of a
// request that does not stream. Made by the service for each request. Belongs to one thread at a
// time.
#pragma once

#include <cstdint>
#include <optional>

#include "proto/kvasir/v1/generation.pb.h"
#include "proto/vllm/grpc/vllm_engine.pb.h"

namespace kvasir::coordinator {

class VllmAnswer {
 public:
  enum class Form { kChunks, kWhole };

  explicit VllmAnswer(Form form) : form_(form) {}

  // Takes the next message. Returns the message for the client, if there is one by now.
  std::optional<::vllm::grpc::engine::GenerateResponse> Take(const v1::GenerateResponse& response);

 private:
  void TakeScores(const v1::PromptLogprobs& scores);
  ::vllm::grpc::engine::GenerateResponse Chunk(const v1::Tokens& tokens);
  ::vllm::grpc::engine::GenerateResponse Complete(const v1::Finish& finish);

  const Form form_;
  uint32_t prompt_tokens_ = 0;
  uint32_t cached_tokens_ = 0;
  // Until the message that they belong to.
  std::optional<::vllm::grpc::engine::InputLogProbs> scores_;
  ::vllm::grpc::engine::GenerateComplete whole_;  // tokens and log probabilities so far
};

}  // namespace kvasir::coordinator
