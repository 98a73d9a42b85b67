// Streaming detokenizer: takes token ids, and returns text as soon as it is whole UTF-8. The texts
// that it returns, including Flush's, concatenate to Tokenizer::Decode of all ids. Called by the
// coordinator's request for every generated token. Time is linear in the text. Belongs to one
// thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

class IncrementalDecoder {
 public:
  // `tokenizer` must outlive the decoder.
  IncrementalDecoder(const Tokenizer& tokenizer, SpecialTokens special_tokens)
      : tokenizer_(&tokenizer), special_tokens_(special_tokens) {}

  // Returns the text that became complete: none for an id without a token (models pad their output
  // head).
  std::string Push(int32_t id);
  // Returns the rest at the end: an unfinished UTF-8 sequence becomes U+FFFD.
  std::string Flush();

 private:
  const Tokenizer* tokenizer_;
  SpecialTokens special_tokens_;
  std::string pending_;  // an incomplete UTF-8 sequence: at most 3 bytes between calls
};

}  // namespace kvasir::coordinator
