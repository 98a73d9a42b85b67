#include "coordinator/tokenizer/regex_dialect.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

// The property White_Space and its complement, as members of a character class.
constexpr absl::string_view kSpace =
    "\\x{9}-\\x{D} \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}"
    "\\x{3000}";
constexpr absl::string_view kNotSpace =
    "\\x{0}-\\x{8}\\x{E}-\\x{1F}\\x{21}-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}"
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-"
    "\\x{10FFFF}";

constexpr std::array<absl::string_view, 35> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N", "Nd",
    "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm",
    "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co"};

// Oniguruma lets these pairs of letters match one character when case is ignored.
constexpr std::array<absl::string_view, 5> kFoldedPairs = {"ff", "fi", "fl", "ss", "st"};

class Translator {
 public:
  explicit Translator(absl::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (pos_ < pattern_.size()) KVASIR_RETURN_IF_ERROR(Element());
    return std::move(out_);
  }

 private:
  enum class Where { kOutside, kInClass };

  bool Looking(absl::string_view text) const {
    return absl::StartsWith(pattern_.substr(pos_), text);
  }

  absl::Status Refuse(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(
        "splitting pattern: ", what, " at byte ", pos_, " is not supported (it may mean another ",
        "thing to PCRE2 than to Oniguruma): ", ForMessage(pattern_)));
  }

  void Copy(size_t n) {
    absl::StrAppend(&out_, pattern_.substr(pos_, n));
    pos_ += n;
  }

  absl::Status Element() {
    const char c = pattern_[pos_];
    if (IgnoringCase() && !absl::ascii_isalpha(static_cast<uint8_t>(c)) &&
        !absl::StrContains("'|?()", c)) {
      return Refuse("anything but letters inside (?i:...)");
    }
    switch (c) {
      case '\\':
        return Escape(Where::kOutside);
      case '[':
        return CharacterClass();
      case '(':
        return OpenGroup();
      case ')':
        if (!ignore_case_.empty()) ignore_case_.pop_back();
        Copy(1);
        return absl::OkStatus();
      case '^':
      case '$':
        return Refuse("an anchor");
      case '*':
      case '+':
      case '?':
        Copy(1);
        if (Looking("+") || Looking("?")) Copy(1);
        return absl::OkStatus();
      case '{':
        return Interval();
      default:
        if (IgnoringCase()) KVASIR_RETURN_IF_ERROR(CheckFolding());
        Copy(1);
        return absl::OkStatus();
    }
  }

  bool IgnoringCase() const { return !ignore_case_.empty() && ignore_case_.back(); }

  absl::Status CheckFolding() const {
    const std::string pair = absl::AsciiStrToLower(pattern_.substr(pos_, 2));
    if (std::find(kFoldedPairs.begin(), kFoldedPairs.end(), pair) != kFoldedPairs.end()) {
      return Refuse(absl::StrCat("'", pair, "' inside (?i:...)"));
    }
    return absl::OkStatus();
  }

  absl::Status OpenGroup() {
    bool ignore_case = IgnoringCase();
    size_t length = 1;
    if (Looking("(?")) {
      length = 0;
      for (const absl::string_view kind : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"}) {
        if (Looking(kind)) length = kind.size();
      }
      if (length == 0) return Refuse("this kind of group");
      ignore_case = ignore_case || Looking("(?i:");
    }
    ignore_case_.push_back(ignore_case);
    Copy(length);
    return absl::OkStatus();
  }

  // {n}, {n,}, {n,m} with nothing greedy, lazy or possessive after it.
  absl::Status Interval() {
    const absl::string_view rest = pattern_.substr(pos_);
    const auto is_digit = [](char c) { return absl::ascii_isdigit(static_cast<uint8_t>(c)); };
    size_t i = 1;
    while (i < rest.size() && is_digit(rest[i])) ++i;
    const bool has_minimum = i > 1;
    if (i < rest.size() && rest[i] == ',') ++i;
    while (i < rest.size() && is_digit(rest[i])) ++i;
    if (!has_minimum || i == rest.size() || rest[i] != '}') return Refuse("this use of '{'");
    const absl::string_view after = rest.substr(i + 1, 1);
    if (after == "+" || after == "?") return Refuse("'+' or '?' after an interval");
    Copy(i + 1);
    return absl::OkStatus();
  }

  absl::Status CharacterClass() {
    Copy(1);
    if (Looking("^")) Copy(1);
    if (Looking("]")) return Refuse("']' as the first of a class");
    bool after_set = false;  // the last member was e.g. \s, which cannot begin a range
    while (pos_ < pattern_.size() && pattern_[pos_] != ']') {
      if (Looking("[")) return Refuse("an unescaped '[' in a class");
      if (Looking("&&")) return Refuse("an intersection of classes");
      if (Looking("-") && after_set && !Looking("-]")) return Refuse("a range from a set");
      if (Looking("-\\") && !EscapesLiteral(pos_ + 1)) return Refuse("a range to a set");
      if (Looking("\\")) {
        after_set = !EscapesLiteral(pos_);
        KVASIR_RETURN_IF_ERROR(Escape(Where::kInClass));
      } else {
        after_set = false;
        Copy(1);
      }
    }
    if (pos_ == pattern_.size()) return Refuse("a class without its ']'");
    Copy(1);
    return absl::OkStatus();
  }

  bool EscapesLiteral(size_t backslash) const {
    const absl::string_view next = pattern_.substr(backslash + 1, 1);
    return !next.empty() && !absl::StrContains("sSdDpP", next);
  }

  absl::Status Escape(Where where) {
    const char c = pos_ + 1 < pattern_.size() ? pattern_[pos_ + 1] : '\0';
    switch (c) {
      case 's':
      case 'S':
        absl::StrAppend(&out_, where == Where::kInClass ? "" : "[", c == 's' ? kSpace : kNotSpace,
                        where == Where::kInClass ? "" : "]");
        pos_ += 2;
        return absl::OkStatus();
      case 'd':
      case 'D':
      case 'n':
      case 'r':
      case 't':
      case 'f':
        Copy(2);
        return absl::OkStatus();
      case 'p':
      case 'P':
        return Property();
      case 'u':
        return CodePoint(2, pattern_.substr(pos_ + 2, 4), 4);
      case 'x': {
        const size_t close = pattern_.find('}', pos_);
        if (!Looking("\\x{") || close == absl::string_view::npos) return Refuse("\\x without {}");
        return CodePoint(3, pattern_.substr(pos_ + 3, close - pos_ - 3), close - pos_ - 2);
      }
      default:
        if (!absl::ascii_ispunct(static_cast<uint8_t>(c))) return Refuse("this escape");
        Copy(2);
        return absl::OkStatus();
    }
  }

  // Appends a code point. `digits` begin `skip` bytes after the backslash; with the characters that
  // close them they take `length` bytes.
  absl::Status CodePoint(size_t skip, absl::string_view digits, size_t length) {
    const bool all_hex = std::all_of(digits.begin(), digits.end(), [](char c) {
      return absl::ascii_isxdigit(static_cast<uint8_t>(c));
    });
    if (!all_hex || digits.empty() || digits.size() > 6 || (skip == 2 && digits.size() != 4)) {
      return Refuse("this code point");
    }
    absl::StrAppend(&out_, "\\x{", digits, "}");
    pos_ += skip + length;
    return absl::OkStatus();
  }

  // \p{L} stays, \p{Han} becomes \p{sc:Han}; PCRE2 refuses names that it does not know.
  absl::Status Property() {
    const absl::string_view rest = pattern_.substr(pos_);
    const size_t close = rest.find('}');
    if (rest.substr(2, 1) != "{" || close == absl::string_view::npos)
      return Refuse("this property");
    absl::string_view name = rest.substr(3, close - 3);
    const absl::string_view negation = absl::StartsWith(name, "^") ? "^" : "";
    name.remove_prefix(negation.size());
    const bool category =
        std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    const bool letters = std::all_of(name.begin(), name.end(), [](char c) {
      return absl::ascii_isalpha(static_cast<uint8_t>(c)) || c == '_';
    });
    if (!category && (!letters || name.size() < 3)) return Refuse("this property");
    absl::StrAppend(&out_, rest.substr(0, 3), negation, category ? "" : "sc:", name, "}");
    pos_ += close + 1;
    return absl::OkStatus();
  }

  absl::string_view pattern_;
  size_t pos_ = 0;
  std::string out_;
  std::vector<bool> ignore_case_;  // by open group
};

}  // namespace

absl::StatusOr<std::string> TranslateToPcre(absl::string_view pattern) {
  return Translator(pattern).Run();
}

}  // namespace kvasir::coordinator
