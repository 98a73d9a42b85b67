#include "coordinator/chat/parsing/lexer.h"

#include <algorithm>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#include "coordinator/chat/parsing/string_literal.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Kind = TemplateToken::Kind;

// Longer ones first.
constexpr absl::string_view kOperators[] = {"//", "**", "==", "!=", "<=", ">=", "<", ">", "=",
                                            "+",  "-",  "~",  "*",  "/",  "%",  "(", ")", "[",
                                            "]",  "{",  "}",  ",",  ".",  ":",  "|"};

class Lexer {
 public:
  explicit Lexer(absl::string_view source) : source_(source) {}

  absl::StatusOr<std::vector<TemplateToken>> Run() {
    while (pos_ < source_.size()) {
      const size_t tag = FindTag();
      const bool closes = tag == source_.size();
      const char sign = closes || tag + 2 >= source_.size() ? ' ' : source_[tag + 2];
      AddText(tag, closes ? 'e' : source_[tag + 1], sign);
      if (closes) break;
      KVASIR_RETURN_IF_ERROR(ReadTag(sign));
    }
    Add(Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  absl::Status Error(absl::string_view message) const {
    return absl::InvalidArgumentError(absl::StrCat("line ", line_, ": ", message));
  }

  void Add(Kind kind, std::string text) {
    tokens_.push_back({.kind = kind, .line = line_, .text = std::move(text)});
  }

  void MoveTo(size_t pos) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(pos_),
                                         source_.begin() + static_cast<ptrdiff_t>(pos), '\n'));
    pos_ = pos;
  }

  size_t FindTag() const {
    for (size_t tag = source_.find('{', pos_); tag != absl::string_view::npos;
         tag = source_.find('{', tag + 1)) {
      if (tag + 1 < source_.size() &&
          absl::string_view("{%#").find(source_[tag + 1]) != absl::string_view::npos) {
        return tag;
      }
    }
    return source_.size();
  }

  // Adds the text before the tag at `end`, less the white space that the tag takes.
  void AddText(size_t end, char tag_kind, char sign) {
    absl::string_view text = source_.substr(pos_, end - pos_);
    if (sign == '-') {
      text = absl::StripTrailingAsciiWhitespace(text);
    } else if (sign != '+' && (tag_kind == '%' || tag_kind == '#')) {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == absl::string_view::npos ? 0 : newline + 1;
      const bool begins_line = line > 0 || pos_ == 0 || source_[pos_ - 1] == '\n';
      if (begins_line && absl::StripAsciiWhitespace(text.substr(line)).empty()) {
        text = text.substr(0, line);
      }
    }
    if (!text.empty()) Add(Kind::kText, std::string(text));
    MoveTo(end);
  }

  absl::Status ReadTag(char sign) {
    const char kind = source_[pos_ + 1];
    MoveTo(pos_ + (sign == '-' || sign == '+' ? 3 : 2));
    if (kind == '#') return SkipComment();
    const bool output = kind == '{';
    if (!output && IsRaw()) return ReadRaw();
    Add(output ? Kind::kOutputBegin : Kind::kBlockBegin, "");
    open_brackets_.clear();
    while (true) {
      SkipSpace();
      if (pos_ == source_.size()) return Error("the tag has no end");
      if (open_brackets_.empty() && ReadEnd(output ? "}}" : "%}")) {
        return absl::OkStatus();
      }
      KVASIR_RETURN_IF_ERROR(ReadToken());
    }
  }

  void SkipSpace() {
    size_t pos = pos_;
    while (pos < source_.size() && absl::ascii_isspace(static_cast<unsigned char>(source_[pos]))) {
      ++pos;
    }
    MoveTo(pos);
  }

  // Moves after the end of a tag and the white space that it takes; false when there is none here.
  bool ReadEnd(absl::string_view end) {
    const absl::string_view rest = source_.substr(pos_);
    const bool minus = absl::StartsWith(rest, absl::StrCat("-", end));
    const bool plus = end == "%}" && absl::StartsWith(rest, "+%}");
    if (!minus && !plus && !absl::StartsWith(rest, end)) return false;
    if (end != "#}") Add(end == "}}" ? Kind::kOutputEnd : Kind::kBlockEnd, "");
    MoveTo(pos_ + end.size() + (minus || plus ? 1 : 0));
    if (minus) {
      SkipSpace();
    } else if (!plus && end != "}}" && absl::StartsWith(source_.substr(pos_), "\n")) {
      MoveTo(pos_ + 1);
    }
    return true;
  }

  absl::Status SkipComment() {
    const size_t end = source_.find("#}", pos_);
    if (end == absl::string_view::npos) return Error("the comment has no end");
    MoveTo(end > pos_ && source_[end - 1] == '-' ? end - 1 : end);
    ReadEnd("#}");
    return absl::OkStatus();
  }

  // Returns where the block tag `name` that begins at `begin` ends, after "%}"; nullopt when there
  // is another tag.
  std::optional<size_t> EndOfPlainTag(size_t begin, absl::string_view name) const {
    const absl::string_view rest = source_.substr(begin);
    absl::string_view tail = absl::StripLeadingAsciiWhitespace(rest);
    if (!absl::StartsWith(tail, name)) return std::nullopt;
    tail = absl::StripLeadingAsciiWhitespace(tail.substr(name.size()));
    if (absl::StartsWith(tail, "-")) tail.remove_prefix(1);
    if (!absl::StartsWith(tail, "%}")) return std::nullopt;
    return source_.size() - tail.size() + 2;
  }

  bool IsRaw() const { return EndOfPlainTag(pos_, "raw").has_value(); }

  absl::Status ReadRaw() {
    const size_t begin = *EndOfPlainTag(pos_, "raw");
    const bool trims = source_[begin - 3] == '-';
    for (size_t tag = source_.find("{%", begin); tag != absl::string_view::npos;
         tag = source_.find("{%", tag + 2)) {
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
      const size_t name = tag + (sign == '-' || sign == '+' ? 3 : 2);
      if (name > source_.size()) break;
      const std::optional<size_t> end = EndOfPlainTag(name, "endraw");
      if (!end.has_value()) continue;
      MoveTo(begin);
      if (trims) SkipSpace();
      if (pos_ < tag) AddText(tag, '%', sign);
      MoveTo(source_[*end - 3] == '-' ? *end - 3 : *end - 2);
      ReadEnd("%}");
      tokens_.pop_back();  // the end of a tag that has no beginning
      return absl::OkStatus();
    }
    return Error("raw has no endraw");
  }

  absl::Status ReadToken() {
    const char c = source_[pos_];
    if (c == '\'' || c == '"') return ReadString(c);
    if (absl::ascii_isdigit(static_cast<unsigned char>(c))) return ReadNumber();
    if (absl::ascii_isalpha(static_cast<unsigned char>(c)) || c == '_') {
      size_t end = pos_;
      while (
          end < source_.size() &&
          (absl::ascii_isalnum(static_cast<unsigned char>(source_[end])) || source_[end] == '_')) {
        ++end;
      }
      Add(Kind::kName, std::string(source_.substr(pos_, end - pos_)));
      MoveTo(end);
      return absl::OkStatus();
    }
    for (const absl::string_view op : kOperators) {
      if (absl::StartsWith(source_.substr(pos_), op)) return ReadOperator(op);
    }
    return Error(absl::StrCat("byte 0x", absl::Hex(static_cast<unsigned char>(c)),
                              " begins no token of Jinja"));
  }

  absl::Status ReadOperator(absl::string_view op) {
    constexpr absl::string_view kOpening = "([{";
    constexpr absl::string_view kClosing = ")]}";
    if (kOpening.find(op[0]) != absl::string_view::npos) {
      open_brackets_.push_back(kClosing[kOpening.find(op[0])]);
    } else if (kClosing.find(op[0]) != absl::string_view::npos) {
      if (open_brackets_.empty() || open_brackets_.back() != op[0]) {
        return Error(absl::StrCat("'", op, "' closes nothing"));
      }
      open_brackets_.pop_back();
    }
    Add(Kind::kOperator, std::string(op));
    MoveTo(pos_ + op.size());
    return absl::OkStatus();
  }

  absl::Status ReadString(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) {
      end += source_[end] == '\\' ? size_t{2} : size_t{1};
    }
    if (end >= source_.size()) return Error("a string has no end");
    absl::StatusOr<std::string> value = UnescapeLiteral(source_.substr(pos_ + 1, end - pos_ - 1));
    if (!value.ok()) return Error(value.status().message());
    Add(Kind::kString, *std::move(value));
    MoveTo(end + 1);
    return absl::OkStatus();
  }

  absl::Status ReadNumber() {
    size_t end = pos_;
    Kind kind = Kind::kInteger;
    const auto digits = [&] {
      while (end < source_.size() &&
             absl::ascii_isdigit(static_cast<unsigned char>(source_[end]))) {
        ++end;
      }
    };
    digits();
    const auto digit_at = [&](size_t pos) {
      return pos < source_.size() && absl::ascii_isdigit(static_cast<unsigned char>(source_[pos]));
    };
    if (end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
      kind = Kind::kFloat;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const bool has_sign =
          end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-');
      const size_t exponent = end + (has_sign ? 2 : 1);
      if (digit_at(exponent)) {
        kind = Kind::kFloat;
        end = exponent;
        digits();
      }
    }
    Add(kind, std::string(source_.substr(pos_, end - pos_)));
    MoveTo(end);
    return absl::OkStatus();
  }

  const absl::string_view source_;
  size_t pos_ = 0;
  int line_ = 1;
  std::string open_brackets_;  // those that close the open ones of the tag
  std::vector<TemplateToken> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<TemplateToken>> ReadTokens(absl::string_view source) {
  std::string text = absl::StrReplaceAll(source, {{"\r\n", "\n"}, {"\r", "\n"}});
  if (absl::EndsWith(text, "\n")) text.pop_back();
  return Lexer(text).Run();
}

}  // namespace kvasir::coordinator
