// Translates the splitting patterns of tokenizer.json, written for Oniguruma (which Hugging Face
// `tokenizers` uses), to PCRE2. Accepts only constructs that mean the same in both or can be
// rewritten so that they do. Refuses the rest, because a pattern that is read differently gives
// other tokens without any error. Rewritten: \s and \S (PCRE2 adds U+180E), scripts such as \p{Han}
// (PCRE2 takes script extensions), \uHHHH. Called by split_regex only. Pure function.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// Errors: INVALID_ARGUMENT with the construct and its byte offset.
// REQUIRES: `pattern` is well-formed UTF-8.
absl::StatusOr<std::string> TranslateToPcre(absl::string_view pattern);

}  // namespace kvasir::coordinator
