#include "coordinator/chat/parsing/string_literal.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::string_view kEscapes = "\\'\"abfnrtv";
constexpr absl::string_view kEscaped = "\\'\"\a\b\f\n\r\t\v";

// Appends the code point of \x, \u or \U, whose digits begin at `pos`; returns where they end.
absl::StatusOr<size_t> AppendHex(absl::string_view literal, size_t pos, size_t digits,
                                 std::string* out) {
  uint32_t code_point = 0;
  const absl::string_view hex = literal.substr(pos, digits);
  const bool are_digits = std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit);
  if (hex.size() < digits || !are_digits || !absl::SimpleHexAtoi(hex, &code_point) ||
      code_point > 0x10FFFF || (code_point >= 0xD800 && code_point < 0xE000)) {
    return absl::InvalidArgumentError(absl::StrCat("the escape \\", literal.substr(pos - 1, 1),
                                                   ForMessage(hex), " is no character"));
  }
  AppendUtf8(code_point, out);
  return pos + digits;
}

}  // namespace

absl::StatusOr<std::string> UnescapeLiteral(absl::string_view literal) {
  std::string out;
  for (size_t pos = 0; pos < literal.size();) {
    if (literal[pos] != '\\' || pos + 1 == literal.size()) {
      out += literal[pos++];
      continue;
    }
    const char c = literal[pos + 1];
    const size_t known = kEscapes.find(c);
    if (known != absl::string_view::npos) {
      out += kEscaped[known];
      pos += 2;
    } else if (c == '\n') {
      pos += 2;
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : (c == 'u' ? 4 : 8);
      KVASIR_ASSIGN_OR_RETURN(pos, AppendHex(literal, pos + 2, digits, &out));
    } else if (c >= '0' && c <= '7') {
      char32_t value = 0;
      size_t end = pos + 1;
      for (; end < literal.size() && end < pos + 4 && literal[end] >= '0' && literal[end] <= '7';
           ++end) {
        value = value * 8 + static_cast<char32_t>(literal[end] - '0');
      }
      AppendUtf8(value, &out);
      pos = end;
    } else {
      out += '\\';
      ++pos;
    }
  }
  return out;
}

}  // namespace kvasir::coordinator
