// Functions that need Unicode's tables: normalization form C, which Qwen's tokenizers apply before
// splitting, and the word characters of added tokens. Uses the tables of utf8proc (350 KB; ICU
// would need 31 MB of data for these two functions). Orders combining marks itself, because
// utf8proc takes quadratic time over a long run of them. Called by the tokenizer. Pure functions.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// REQUIRES: `text` is well-formed UTF-8.
std::string NormalizeNfc(absl::string_view text);

// \w of Unicode TR 18, annex C: letters, marks, decimal digits, connectors, joiners.
bool IsWordCharacter(char32_t code_point);

}  // namespace kvasir::coordinator
