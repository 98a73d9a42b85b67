// Finds stop strings in streamed text. StopStrings is the automaton (Aho-Corasick), built once per
// request. A StopMatcher passes one sequence's text through it and holds back exactly the text that
// may still become a stop string. Called by the coordinator's request after detokenizing. Request
// parsing limits the number and size of stop strings. Time is linear in stop strings and text,
// however the text is cut. StopStrings is immutable; a StopMatcher belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "coordinator/tokenizer/byte_trie.h"

namespace kvasir::coordinator {

class StopStrings {
 public:
  // Errors: INVALID_ARGUMENT for an empty stop string. The list may be empty.
  static absl::StatusOr<StopStrings> Create(absl::Span<const std::string> stop_strings);

 private:
  friend class StopMatcher;
  explicit StopStrings(absl::Span<const std::string> stop_strings);

  int32_t Next(int32_t node, uint8_t byte) const;

  ByteTrie trie_;
  std::vector<int64_t> lengths_;  // of each stop string, in bytes
  // For each node: the node of the longest proper suffix that is in the trie; the depth; and the
  // longest stop string that the node's text ends with, or kNone.
  std::vector<int32_t> fail_;
  std::vector<int32_t> depth_;
  std::vector<int32_t> match_;
};

class StopMatcher {
 public:
  enum class StopText { kExclude, kInclude };  // whether the emitted text has the stop string

  struct Output {
    std::string text;                   // may be sent to the client
    std::optional<int64_t> stopped_by;  // index of the stop string; the sequence ends here
  };

  // `stops` must outlive the matcher.
  StopMatcher(const StopStrings& stops, StopText stop_text)
      : stops_(&stops), stop_text_(stop_text) {}

  // Returns the text that may be sent. The match is the one that is complete first, and the
  // longest of those that end together, so it does not depend on how the text was cut. After a
  // match further text is dropped. The output is whole UTF-8 when stop strings and pushed text are.
  Output Push(absl::string_view text);
  // Returns the text held back so far, at the end of the sequence.
  std::string Flush();

 private:
  const StopStrings* stops_;
  StopText stop_text_;
  bool stopped_ = false;
  int32_t node_ = ByteTrie::kRoot;
  // The text held back is buffer_ from begin_ on. Between calls its length is the depth of node_.
  std::string buffer_;
  size_t begin_ = 0;
};

}  // namespace kvasir::coordinator
