#include "coordinator/tokenizer/unicode/unicode.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utf8proc.h>
#include <vector>

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

// Code points below the first combining mark neither decompose under NFC nor compose with anything
// before them, so text may be cut before each.
constexpr char32_t kFirstCombiningMark = 0x300;
// The longest canonical decomposition has four code points.
constexpr size_t kMaxDecomposition = 4;

int CombiningClass(utf8proc_int32_t code_point) {
  return utf8proc_get_property(code_point)->combining_class;
}

void AppendDecomposed(char32_t code_point, std::vector<utf8proc_int32_t>* out) {
  std::array<utf8proc_int32_t, kMaxDecomposition> parts;
  int bound_class = 0;
  const utf8proc_ssize_t n =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), parts.data(), parts.size(),
                              UTF8PROC_DECOMPOSE, &bound_class);
  KVASIR_CHECK(n >= 0 && static_cast<size_t>(n) <= parts.size());
  out->insert(out->end(), parts.begin(), parts.begin() + n);
}

// Canonical ordering: sorts every run of non-zero combining classes by class, stably.
void OrderMarks(std::vector<utf8proc_int32_t>* code_points) {
  const auto is_starter = [](utf8proc_int32_t c) { return CombiningClass(c) == 0; };
  auto begin = code_points->begin();
  while (begin != code_points->end()) {
    const auto end = std::find_if(begin, code_points->end(), is_starter);
    std::stable_sort(begin, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return CombiningClass(a) < CombiningClass(b);
    });
    begin = std::find_if_not(end, code_points->end(), is_starter);
  }
}

// Appends the normalized form of a segment: a code point, and the marks and others after it.
void AppendSegment(absl::string_view segment, std::vector<utf8proc_int32_t>* scratch,
                   std::string* out) {
  scratch->clear();
  for (size_t pos = 0; pos < segment.size();) {
    const Utf8Unit unit = CodePointAt(segment, pos);
    AppendDecomposed(unit.value, scratch);
    pos += unit.length;
  }
  OrderMarks(scratch);
  constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  const utf8proc_ssize_t n = utf8proc_normalize_utf32(
      scratch->data(), static_cast<utf8proc_ssize_t>(scratch->size()), kCompose);
  KVASIR_CHECK(n >= 0);
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    AppendUtf8(static_cast<char32_t>((*scratch)[i]), out);
  }
}

}  // namespace

std::string NormalizeNfc(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> scratch;
  size_t plain_begin = 0;  // text[plain_begin, pos) is normal and not yet copied
  size_t previous = 0;     // begin of the code point before pos
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Unit unit = CodePointAt(text, pos);
    if (unit.value < kFirstCombiningMark) {
      previous = pos;
      pos += unit.length;
      continue;
    }
    size_t end = pos + unit.length;
    while (end < text.size()) {
      const Utf8Unit next = CodePointAt(text, end);
      if (next.value < kFirstCombiningMark) break;
      end += next.length;
    }
    // The segment includes the code point before it, with which a mark may compose.
    const size_t begin = pos == plain_begin ? pos : previous;
    out.append(text.data() + plain_begin, begin - plain_begin);
    AppendSegment(text.substr(begin, end - begin), &scratch, &out);
    plain_begin = previous = pos = end;
  }
  out.append(text.data() + plain_begin, text.size() - plain_begin);
  return out;
}

bool IsWordCharacter(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Joiners, and circled and squared letters: symbols with the property Other_Alphabetic.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

}  // namespace kvasir::coordinator
