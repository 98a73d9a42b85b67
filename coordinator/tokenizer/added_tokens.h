// Finds added tokens (<|im_end|>, <think>, ...) in a text before it is split and merged, with the
// rules of Hugging Face `tokenizers`: the leftmost match, and the longest of those. A token may
// match whole words only, or take the white space beside it. Called by the tokenizer. Immutable
// after construction, so it may be shared between threads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "coordinator/tokenizer/byte_trie.h"

namespace kvasir::coordinator {

struct AddedToken {
  std::string content;  // not empty, well-formed UTF-8
  int32_t id;
  bool single_word = false;  // only without a letter, digit, mark or connector beside it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;
  bool normalized = false;  // matched in its normalized form in the normalized text
  bool special = false;
};

enum class SpecialTokenText { kParse, kPlainText };

// The bytes [begin, end) of a text; begin < end.
struct TextSpan {
  size_t begin;
  size_t end;
};

class AddedTokens {
 public:
  // Gets a run of text, or the text that a token took and its id.
  using Sink = absl::FunctionRef<absl::Status(absl::string_view text, std::optional<int32_t> id)>;

  // REQUIRES: contents are distinct; none begins with white space if any token has rstrip.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Cuts `text` (well-formed UTF-8) and hands the parts to `sink` in order. Stops at the first
  // error. Special tokens are not matched under kPlainText, nor where they have a byte in one of
  // `plain_spans`, which are in order and disjoint.
  absl::Status Split(absl::string_view text, SpecialTokenText special_token_text,
                     absl::Span<const TextSpan> plain_spans, Sink sink) const;

 private:
  struct Match {
    const AddedToken* token;  // null: none here
    size_t next;              // where to look on
  };
  Match MatchAt(absl::string_view text, size_t pos, SpecialTokenText special_token_text,
                absl::Span<const TextSpan> plain_spans) const;

  std::vector<AddedToken> tokens_;
  ByteTrie trie_;
  std::array<bool, 256> begins_token_{};  // by first byte
};

}  // namespace kvasir::coordinator
