// UTF-8 at the byte level: validation, stepping over code points, and lossy decoding, which
// replaces ill-formed bytes by U+FFFD. Hides the table of well-formed sequences (Unicode 15, table
// 3-7). Called by the tokenizer and its streaming decoder. Pure functions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

struct Utf8Unit {
  enum class Kind {
    kCodePoint,   // `length` bytes are the code point `value`
    kIllFormed,   // `length` bytes are a maximal subpart that can become no code point
    kIncomplete,  // the text ends inside a sequence that is well-formed so far
  };
  Kind kind;
  size_t length;
  char32_t value = 0;
};

// Returns the unit that begins at `bytes[0]`. REQUIRES: bytes is not empty.
Utf8Unit ReadUtf8(absl::string_view bytes);

// Returns the offset of the first byte that is not part of well-formed UTF-8.
std::optional<size_t> FindInvalidUtf8(absl::string_view bytes);

// Return the code point that begins at `pos`, and the one that ends just before `pos`.
// REQUIRES: `text` is well-formed; pos is a boundary; pos < size, pos > 0 respectively.
Utf8Unit CodePointAt(absl::string_view text, size_t pos);
Utf8Unit CodePointBefore(absl::string_view text, size_t pos);

void AppendUtf8(char32_t code_point, std::string* out);

// Bytes that one U+FFFD stands for.
enum class Replacement {
  kSubpart,  // an ill-formed maximal subpart, as browsers, Python and Rust do
  kByte,     // one ill-formed byte, as in byte fallback
};

// Appends `bytes` as text, with U+FFFD for ill-formed bytes. Stops before an incomplete sequence at
// the end. Returns the number of bytes consumed.
size_t AppendLossyUtf8(absl::string_view bytes, std::string* out,
                       Replacement replacement = Replacement::kSubpart);

inline constexpr absl::string_view kReplacementCharacter = "\xEF\xBF\xBD";

// Returns untrusted text for a message: cut when it is long, control characters escaped, and always
// valid UTF-8.
std::string ForMessage(absl::string_view text);

// True for the 25 code points with the Unicode property White_Space.
bool IsWhiteSpace(char32_t code_point);

}  // namespace kvasir::coordinator
