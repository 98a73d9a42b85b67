// Cuts a text into the pieces that BPE works on, by a chain of stages that each cut the pieces of
// the stage before. Hides how tokenizer.json's kinds of pre-tokenizer (Split, Digits, ByteLevel,
// Metaspace, Sequence) become three kinds of stage. Pieces are handed out one by one, so that a
// caller can stop early and no memory of the size of the text is needed. Called by the tokenizer.
// Immutable.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "coordinator/tokenizer/split_regex.h"

namespace kvasir::coordinator {

// Whether something begins a text, or follows other parts of it.
enum class TextPosition { kBegin, kInside };

class PreTokenizer {
 public:
  // Treatment of a pattern's matches; `invert` swaps matches and the text between them.
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Split {
    SplitRegex regex;
    Behavior behavior;
    bool invert = false;
  };
  // Puts a space before every piece that does not begin with one.
  struct AddPrefixSpace {};
  // Puts `mark` (one character) in the place of spaces, and before pieces that do not begin with
  // it: all, none, or the one that begins the text.
  struct MarkSpaces {
    enum class Prepend { kFirst, kAlways, kNever };
    std::string mark;
    Prepend prepend;
  };
  using Stage = std::variant<Split, AddPrefixSpace, MarkSpaces>;
  using Sink = absl::FunctionRef<absl::Status(absl::string_view piece)>;

  explicit PreTokenizer(std::vector<Stage> stages) : stages_(std::move(stages)) {}

  // Hands the pieces of `text` (well-formed UTF-8), none of them empty, to `sink` in order. Stops
  // at the first error. A piece is valid only during the call.
  absl::Status Run(absl::string_view text, TextPosition position, SplitRegex::Scratch* scratch,
                   Sink sink) const;

 private:
  absl::Status RunFrom(size_t stage, absl::string_view piece, TextPosition position,
                       SplitRegex::Scratch* scratch, Sink sink) const;

  std::vector<Stage> stages_;
};

}  // namespace kvasir::coordinator
