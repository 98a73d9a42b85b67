#include "coordinator/http/answers/token_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

std::string TokenText(const Tokenizer& tokenizer, uint32_t id) {
  const absl::string_view bytes = tokenizer.TokenBytes(static_cast<int32_t>(id));
  if (!FindInvalidUtf8(bytes).has_value()) return std::string(bytes);
  std::string text = "bytes:";
  for (const char c : bytes) {
    absl::StrAppendFormat(&text, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  }
  return text;
}

int64_t TokenCharacters(const Tokenizer& tokenizer, uint32_t id) {
  int64_t characters = 0;
  for (const char c : tokenizer.TokenBytes(static_cast<int32_t>(id))) {
    if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) ++characters;  // begins a code point
  }
  return characters;
}

}  // namespace kvasir::coordinator
