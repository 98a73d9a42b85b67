// Streaming detokenizer: takes token ids, and returns text as soon as it is whole UTF-8. The texts
// that it returns, including Flush's, concatenate to Tokenizer::Decode of all ids. Hides the bytes
// of byte fallback and the space that a text's first token loses. Called by the coordinator's
// request for every generated token, and by Decode. Time is linear in the text. Belongs to one
// thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/tokenizer/tokenizer.h"

namespace kvasir::coordinator {

class IncrementalDecoder {
 public:
  // `tokenizer` must outlive the decoder. Tokens inside a text, as the answer to a prompt, keep
  // their space.
  IncrementalDecoder(const Tokenizer& tokenizer, SpecialTokens special_tokens,
                     TextPosition position)
      : tokenizer_(&tokenizer),
        special_tokens_(special_tokens),
        is_first_token_(position == TextPosition::kBegin),
        may_strip_(is_first_token_ ? tokenizer.decoder_rules().max_stripped : 0) {}

  // Returns the text that became complete: none for an id without a token (models pad their output
  // head).
  std::string Push(int32_t id);
  // Returns the rest at the end: an unfinished UTF-8 sequence becomes U+FFFD.
  std::string Flush();

 private:
  // Returns `text`, which comes next, without what the begin of a text loses.
  std::string Stripped(std::string text);

  const Tokenizer* tokenizer_;
  SpecialTokens special_tokens_;
  bool is_first_token_;
  int64_t may_strip_;    // characters at the begin of the text
  std::string pending_;  // an incomplete UTF-8 sequence: at most 3 bytes between calls
};

}  // namespace kvasir::coordinator
