// Texts of single tokens in log probabilities. Pure functions: thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

// Returns the token's text. Bytes that are not UTF-8 by themselves are told as OpenAI does,
// "bytes:\xe2\x96", so that different tokens have different texts.
std::string TokenText(const Tokenizer& tokenizer, uint32_t id);
// Returns the number of code points that the token adds to a text.
int64_t TokenCharacters(const Tokenizer& tokenizer, uint32_t id);

}  // namespace kvasir::coordinator
