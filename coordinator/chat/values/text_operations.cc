#include "coordinator/chat/values/text_operations.h"

#include <algorithm>
#include <string>

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"
#include "utf8proc.h"

namespace kvasir::coordinator {
namespace {

bool IsIn(char32_t code_point, std::optional<absl::string_view> set) {
  if (!set.has_value()) return IsPythonSpace(code_point);
  for (size_t pos = 0; pos < set->size();) {
    const Utf8Unit unit = CodePointAt(*set, pos);
    if (unit.value == code_point) return true;
    pos += unit.length;
  }
  return false;
}

size_t SkipSpace(absl::string_view text, size_t pos) {
  while (pos < text.size()) {
    const Utf8Unit unit = CodePointAt(text, pos);
    if (!IsPythonSpace(unit.value)) break;
    pos += unit.length;
  }
  return pos;
}

size_t SkipWord(absl::string_view text, size_t pos) {
  while (pos < text.size()) {
    const Utf8Unit unit = CodePointAt(text, pos);
    if (IsPythonSpace(unit.value)) break;
    pos += unit.length;
  }
  return pos;
}

// Takes the parts of a text one by one, and pays for each before it is kept.
class Parts {
 public:
  explicit Parts(Budget* budget) : budget_(*budget) {}

  absl::Status Add(size_t begin, size_t end) {
    spans_.push_back({begin, end});
    return budget_.SpendBytes(sizeof(TextSpan) + sizeof(MarkedText));
  }
  std::vector<TextSpan> Take() { return std::move(spans_); }

 private:
  Budget& budget_;
  std::vector<TextSpan> spans_;
};

// Returns the parts of `text` between white space.
absl::StatusOr<std::vector<TextSpan>> Words(absl::string_view text, int64_t most, Budget* budget) {
  Parts words(budget);
  int64_t count = 0;
  for (size_t pos = SkipSpace(text, 0); pos < text.size(); ++count) {
    const size_t end = most >= 0 && count == most ? text.size() : SkipWord(text, pos);
    KVASIR_RETURN_IF_ERROR(words.Add(pos, end));
    pos = SkipSpace(text, end);
  }
  return words.Take();
}

absl::StatusOr<std::vector<TextSpan>> Between(absl::string_view text, absl::string_view separator,
                                              int64_t most, Side from, Budget* budget) {
  Parts parts(budget);
  size_t begin = 0;
  size_t end = text.size();
  for (int64_t count = 0; most < 0 || count < most; ++count) {
    const absl::string_view rest = text.substr(begin, end - begin);
    const size_t cut = from == Side::kLeft ? rest.find(separator) : rest.rfind(separator);
    if (cut == absl::string_view::npos) break;
    if (from == Side::kLeft) {
      KVASIR_RETURN_IF_ERROR(parts.Add(begin, begin + cut));
      begin += cut + separator.size();
    } else {
      KVASIR_RETURN_IF_ERROR(parts.Add(cut + separator.size(), end));
      end = cut;
    }
  }
  KVASIR_RETURN_IF_ERROR(parts.Add(begin, end));
  std::vector<TextSpan> spans = parts.Take();
  if (from == Side::kRight) std::reverse(spans.begin(), spans.end());
  return spans;
}

}  // namespace

bool IsPythonSpace(char32_t code_point) {
  return IsWhiteSpace(code_point) || (code_point >= 0x1C && code_point <= 0x1F);
}

bool IsPrintable(char32_t code_point) {
  if (code_point == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

int64_t CountCodePoints(absl::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::vector<size_t> CodePointOffsets(absl::string_view text) {
  std::vector<size_t> offsets;
  for (size_t pos = 0; pos < text.size(); ++pos) {
    if ((static_cast<unsigned char>(text[pos]) & 0xC0) != 0x80) offsets.push_back(pos);
  }
  offsets.push_back(text.size());
  return offsets;
}

MarkedText Strip(const MarkedText& text, std::optional<absl::string_view> set, Side side) {
  const absl::string_view bytes = text.bytes();
  size_t begin = 0;
  size_t end = bytes.size();
  while (side != Side::kRight && begin < end) {
    const Utf8Unit unit = CodePointAt(bytes, begin);
    if (!IsIn(unit.value, set)) break;
    begin += unit.length;
  }
  while (side != Side::kLeft && end > begin) {
    const Utf8Unit unit = CodePointBefore(bytes, end);
    if (!IsIn(unit.value, set)) break;
    end -= unit.length;
  }
  return text.Part(begin, end);
}

absl::StatusOr<std::vector<MarkedText>> SplitText(const MarkedText& text,
                                                  std::optional<absl::string_view> separator,
                                                  int64_t most, Side from, Budget* budget) {
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(text.size()));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<TextSpan> spans,
                          separator.has_value()
                              ? Between(text.bytes(), *separator, most, from, budget)
                              : Words(text.bytes(), most, budget));
  std::vector<MarkedText> parts;
  for (const TextSpan& span : spans) parts.push_back(text.Part(span.begin, span.end));
  return parts;
}

absl::StatusOr<MarkedText> ReplaceText(const MarkedText& text, absl::string_view from,
                                       const MarkedText& to, int64_t most, Budget* budget) {
  if (from.empty()) return absl::InvalidArgumentError("replace: the text to replace is empty");
  MarkedText out;
  size_t done = 0;
  for (int64_t count = 0; most < 0 || count < most; ++count) {
    const size_t found = text.bytes().find(from, done);
    if (found == absl::string_view::npos) break;
    KVASIR_RETURN_IF_ERROR(budget->SpendBytes(found - done + to.size()));
    out.AppendPart(text, done, found);
    out.Append(to);
    done = found + from.size();
  }
  KVASIR_RETURN_IF_ERROR(budget->SpendBytes(text.size() - done));
  out.AppendPart(text, done, text.size());
  return out;
}

MarkedText ChangeCase(const MarkedText& text, Case to) {
  std::string changed;
  bool begins_word = true;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Unit unit = CodePointAt(text.bytes(), pos);
    const auto c = static_cast<utf8proc_int32_t>(unit.value);
    const bool upper = to == Case::kUpper || (to == Case::kTitle && begins_word) ||
                       (to == Case::kCapitalized && pos == 0);
    AppendUtf8(static_cast<char32_t>(upper ? utf8proc_toupper(c) : utf8proc_tolower(c)), &changed);
    begins_word = utf8proc_toupper(c) == c && utf8proc_tolower(c) == c;
    pos += unit.length;
  }
  return text.Remade(std::move(changed));
}

}  // namespace kvasir::coordinator
