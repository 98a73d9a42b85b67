// Changes a text before it is split: the steps of tokenizer.json's normalizer (NFC, Prepend,
// Replace) in order. Called by the tokenizer for every run of text between added tokens, and by
// its loader for the contents of added tokens. Immutable, so it may be shared between threads.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

class Normalizer {
 public:
  struct Nfc {};
  // Puts `text` before a text that is not empty.
  struct Prepend {
    std::string text;
  };
  // Replaces every `pattern` (not empty), from left to right.
  struct Replace {
    std::string pattern;
    std::string content;
  };
  using Step = std::variant<Nfc, Prepend, Replace>;

  Normalizer() = default;
  explicit Normalizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  bool empty() const { return steps_.empty(); }
  const std::vector<Step>& steps() const { return steps_; }
  // REQUIRES: `text` is well-formed UTF-8.
  std::string Run(absl::string_view text) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace kvasir::coordinator
