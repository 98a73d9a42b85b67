// Turns the conversation of a request into tokens: the model's chat template is rendered, and
// special tokens are parsed in the template's parts only. Called by request parsing and by
// Tokenize. Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "coordinator/chat/model_chat.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Errors: INVALID_ARGUMENT for a conversation that is not valid, that the template refuses, or that
// has more tokens than `max_tokens`.
absl::StatusOr<std::vector<int32_t>> EncodeChat(const v1::ChatInput& input, const ModelChat& chat,
                                                const Tokenizer& tokenizer, int64_t max_tokens);

}  // namespace kvasir::coordinator
