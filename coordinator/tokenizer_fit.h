// Whether a tokenizer belongs to a model, as far as the model's folder tells. Called by the server
// at start, before any weights are read. Pure function: thread-safe.
#pragma once

#include "absl/status/status.h"

#include "coordinator/model_folder.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

// INVALID_ARGUMENT with the token when the tokenizer has ids beyond the model's vocabulary, when it
// has tokens for less than half of it, or when it lacks a token that ends a text. A model without
// such a token is accepted: its answers end at max_tokens.
absl::Status CheckTokenizerFits(const Tokenizer& tokenizer, const ModelFolder& folder);

}  // namespace kvasir::coordinator
