#include "coordinator/tokenizer/unicode/utf8.h"

#include <cstdint>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

bool IsContinuation(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

size_t AsciiPrefix(absl::string_view bytes) {
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= bytes.size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, sizeof(word));
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (i < bytes.size() && static_cast<uint8_t>(bytes[i]) < 0x80) ++i;
  return i;
}

}  // namespace

Utf8Unit ReadUtf8(absl::string_view bytes) {
  using Kind = Utf8Unit::Kind;
  const auto lead = static_cast<uint8_t>(bytes[0]);
  if (lead < 0x80) return {Kind::kCodePoint, 1, lead};
  // Allowed range of the second byte; the later ones are always 80..BF.
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  size_t length = 0;
  char32_t value = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    value = lead & 0x1Fu;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3;
    value = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;   // no overlong forms
    if (lead == 0xED) high = 0x9F;  // no surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    value = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;   // no overlong forms
    if (lead == 0xF4) high = 0x8F;  // not above U+10FFFF
  } else {
    return {Kind::kIllFormed, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Kind::kIncomplete, i};
    const auto byte = static_cast<uint8_t>(bytes[i]);
    if (byte < low || byte > high) return {Kind::kIllFormed, i};
    value = (value << 6) | (byte & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {Kind::kCodePoint, length, value};
}

std::optional<size_t> FindInvalidUtf8(absl::string_view bytes) {
  size_t pos = 0;
  while (true) {
    pos += AsciiPrefix(bytes.substr(pos));
    if (pos == bytes.size()) return std::nullopt;
    const Utf8Unit unit = ReadUtf8(bytes.substr(pos));
    if (unit.kind != Utf8Unit::Kind::kCodePoint) return pos;
    pos += unit.length;
  }
}

Utf8Unit CodePointAt(absl::string_view text, size_t pos) { return ReadUtf8(text.substr(pos)); }

Utf8Unit CodePointBefore(absl::string_view text, size_t pos) {
  size_t begin = pos - 1;
  while (begin > 0 && IsContinuation(text[begin])) --begin;
  return ReadUtf8(text.substr(begin, pos - begin));
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto append = [out](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    append(code_point);
    return;
  }
  if (code_point < 0x800) {
    append(0xC0 | (code_point >> 6));
  } else {
    if (code_point < 0x10000) {
      append(0xE0 | (code_point >> 12));
    } else {
      append(0xF0 | (code_point >> 18));
      append(0x80 | ((code_point >> 12) & 0x3F));
    }
    append(0x80 | ((code_point >> 6) & 0x3F));
  }
  append(0x80 | (code_point & 0x3F));
}

size_t AppendLossyUtf8(absl::string_view bytes, std::string* out, Replacement replacement) {
  size_t pos = 0;
  while (true) {
    const size_t ascii = AsciiPrefix(bytes.substr(pos));
    out->append(bytes.data() + pos, ascii);
    pos += ascii;
    if (pos == bytes.size()) return pos;
    const Utf8Unit unit = ReadUtf8(bytes.substr(pos));
    if (unit.kind == Utf8Unit::Kind::kIncomplete) return pos;
    if (unit.kind == Utf8Unit::Kind::kCodePoint) {
      out->append(bytes.data() + pos, unit.length);
    } else {
      const size_t count = replacement == Replacement::kByte ? unit.length : 1;
      for (size_t i = 0; i < count; ++i) absl::StrAppend(out, kReplacementCharacter);
    }
    pos += unit.length;
  }
}

std::string ForMessage(absl::string_view text) {
  constexpr size_t kMaxBytes = 200;
  std::string valid;
  const size_t used = AppendLossyUtf8(text.substr(0, kMaxBytes), &valid);
  return absl::StrCat(absl::Utf8SafeCEscape(valid), used < text.size() ? "..." : "");
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace kvasir::coordinator
