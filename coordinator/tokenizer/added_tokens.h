// Finds added tokens (<|im_end|>, <think>, ...) in a text before it is split and merged, with the
// rules of Hugging Face `tokenizers`: leftmost first, the longest of those; a token may ask to be a
// whole word or to swallow the white space beside it. Called by the tokenizer. Immutable after
// construction, so it may be shared between threads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "coordinator/tokenizer/byte_trie.h"

namespace kvasir::coordinator {

struct AddedToken {
  std::string content;  // not empty, well-formed UTF-8
  int32_t id;
  bool single_word = false;  // only where no letter, digit, mark or connector is beside it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;
  bool normalized = false;  // looked for in the normalised text, in its normalised form
  bool special = false;
};

enum class SpecialTokenText { kParse, kPlainText };

class AddedTokens {
 public:
  // Gets a run of text, or the id of a token with the text it took.
  using Sink = absl::FunctionRef<absl::Status(absl::string_view text, std::optional<int32_t> id)>;

  // REQUIRES: contents are distinct, and none begins with white space if one has rstrip.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Cuts `text` (well-formed) and hands the parts to `sink` in order; stops at the first error.
  // Under kPlainText the tokens that are special are not looked for.
  absl::Status Split(absl::string_view text, SpecialTokenText special_token_text, Sink sink) const;

 private:
  std::vector<AddedToken> tokens_;
  ByteTrie trie_;
  std::array<bool, 256> begins_token_{};  // by first byte
};

}  // namespace kvasir::coordinator
