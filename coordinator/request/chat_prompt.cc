#include "coordinator/request/chat_prompt.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::StatusOr<Conversation::End> EndOf(const v1::ChatInput& input) {
  const bool asks_for_prompt = input.has_add_generation_prompt() && input.add_generation_prompt();
  if (!input.continue_final_message()) {
    return asks_for_prompt || !input.has_add_generation_prompt()
               ? Conversation::End::kGenerationPrompt
               : Conversation::End::kLastMessage;
  }
  if (!asks_for_prompt) return Conversation::End::kContinuesLastMessage;
  return absl::InvalidArgumentError(
      "add_generation_prompt and continue_final_message are both set; an answer begins or "
      "continues");
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> EncodeChat(const v1::ChatInput& input, const ModelChat& chat,
                                                const Tokenizer& tokenizer, int64_t max_tokens) {
  KVASIR_ASSIGN_OR_RETURN(const Conversation::End end, EndOf(input));
  KVASIR_ASSIGN_OR_RETURN(const MarkedText text, chat.Render({.messages = input.messages(),
                                                              .tools = input.tools(),
                                                              .variables = input.template_kwargs(),
                                                              .end = end},
                                                             absl::Now()));
  // The template writes what a text begins with.
  return tokenizer.Encode(
      text.bytes(),
      {.add_special_tokens = false, .plain_spans = text.client_spans(), .max_tokens = max_tokens});
}

}  // namespace kvasir::coordinator
