// A compiled splitting pattern: finds the next match in a text. Hides PCRE2 (the patterns of GPT-2,
// Llama 3 and Qwen need look-ahead, which RE2 lacks), its just-in-time compiler and its limits, by
// which a hostile text ends in an error and not in endless backtracking. Debian's PCRE2 10.42 knows
// Unicode 14; letters added since then are split as other characters. Called by the pre-tokenizer.
// Immutable, so it may be shared between threads; a Scratch belongs to one call at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

class SplitRegex {
 public:
  struct Match {
    size_t begin;
    size_t end;  // > begin
  };

  // Memory of one thread for matching; usable with every SplitRegex.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class SplitRegex;
    struct Pcre;
    std::unique_ptr<Pcre> pcre_;
  };

  // Compiles a pattern of tokenizer.json (see regex_dialect.h) or a plain string. Errors:
  // INVALID_ARGUMENT when it is not supported, wrong, or can match the empty string.
  static absl::StatusOr<SplitRegex> CompilePattern(absl::string_view pattern);
  static absl::StatusOr<SplitRegex> CompileLiteral(absl::string_view text);

  // Returns the first match that begins at `from` or later. Look-behind sees text before `from`.
  // Errors: RESOURCE_EXHAUSTED when the limits on backtracking are reached.
  // REQUIRES: `text` is well-formed UTF-8; from <= text.size(), and it is a boundary.
  absl::StatusOr<std::optional<Match>> Find(absl::string_view text, size_t from,
                                            Scratch* scratch) const;

 private:
  struct Code;
  enum class Syntax { kPcre, kLiteral };

  static absl::StatusOr<SplitRegex> Compile(absl::string_view pattern, Syntax syntax);
  explicit SplitRegex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}

  std::shared_ptr<const Code> code_;
};

}  // namespace kvasir::coordinator
