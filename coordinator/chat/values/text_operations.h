// Python's operations on texts, by code points: strip, split, replace, slices, upper and lower
// case. Marks of client text are carried along. Called by the template engine. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/marked_text.h"

namespace kvasir::coordinator {

enum class Side { kBoth, kLeft, kRight };
enum class Case { kLower, kUpper, kTitle, kCapitalized };

// Python's str.isspace and str.isprintable of one code point.
bool IsPythonSpace(char32_t code_point);
bool IsPrintable(char32_t code_point);

int64_t CountCodePoints(absl::string_view text);
// Returns the byte offsets of all code points, and the size.
std::vector<size_t> CodePointOffsets(absl::string_view text);

// Strips white space, or the code points of `set`.
MarkedText Strip(const MarkedText& text, std::optional<absl::string_view> set, Side side);
// Splits at white space, or at `separator`, which is not empty; at most `most` times when that is
// not negative.
absl::StatusOr<std::vector<MarkedText>> SplitText(const MarkedText& text,
                                                  std::optional<absl::string_view> separator,
                                                  int64_t most, Side from, Budget* budget);
absl::StatusOr<MarkedText> ReplaceText(const MarkedText& text, absl::string_view from,
                                       const MarkedText& to, int64_t most, Budget* budget);
// By the simple mappings of Unicode, one code point to one.
MarkedText ChangeCase(const MarkedText& text, Case to);

}  // namespace kvasir::coordinator
