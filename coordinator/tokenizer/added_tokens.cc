#include "coordinator/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "coordinator/tokenizer/unicode/unicode.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

std::vector<std::string> Contents(const std::vector<AddedToken>& tokens) {
  std::vector<std::string> contents;
  contents.reserve(tokens.size());
  for (const AddedToken& token : tokens) contents.push_back(token.content);
  return contents;
}

// Returns where the white space that ends at `end` begins, but at least `limit`.
size_t WhiteSpaceBegin(absl::string_view text, size_t limit, size_t end) {
  while (end > limit) {
    const Utf8Unit unit = CodePointBefore(text, end);
    if (!IsWhiteSpace(unit.value)) break;
    end -= unit.length;
  }
  return end;
}

size_t WhiteSpaceEnd(absl::string_view text, size_t begin) {
  while (begin < text.size()) {
    const Utf8Unit unit = CodePointAt(text, begin);
    if (!IsWhiteSpace(unit.value)) break;
    begin += unit.length;
  }
  return begin;
}

bool IsSingleWord(absl::string_view text, size_t begin, size_t end) {
  if (begin > 0 && IsWordCharacter(CodePointBefore(text, begin).value)) return false;
  return end == text.size() || !IsWordCharacter(CodePointAt(text, end).value);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), trie_(Contents(tokens_)) {
  for (const AddedToken& token : tokens_) {
    begins_token_[static_cast<uint8_t>(token.content[0])] = true;
  }
}

AddedTokens::Match AddedTokens::MatchAt(absl::string_view text, size_t pos,
                                        SpecialTokenText special_token_text,
                                        absl::Span<const TextSpan> plain_spans) const {
  if (!begins_token_[static_cast<uint8_t>(text[pos])]) return {nullptr, pos + 1};
  const std::optional<int32_t> found = trie_.LongestPrefix(text.substr(pos));
  if (!found.has_value()) return {nullptr, pos + 1};
  const AddedToken& token = tokens_[static_cast<size_t>(*found)];
  const size_t end = pos + token.content.size();
  if (!token.special) return {&token, end};
  if (special_token_text == SpecialTokenText::kPlainText) return {nullptr, end};
  const auto* plain = std::partition_point(plain_spans.begin(), plain_spans.end(),
                                           [pos](const TextSpan& span) { return span.end <= pos; });
  if (plain == plain_spans.end() || plain->begin >= end) return {&token, end};
  // Never over the end of the span: after it a token of the text's own may begin.
  if (plain->begin <= pos) return {nullptr, std::min(end, plain->end)};
  // It reaches into a plain span; a shorter one may end before.
  const std::optional<int32_t> shorter = trie_.LongestPrefix(text.substr(pos, plain->begin - pos));
  if (!shorter.has_value()) return {nullptr, pos + 1};
  const AddedToken& before = tokens_[static_cast<size_t>(*shorter)];
  return {&before, pos + before.content.size()};
}

absl::Status AddedTokens::Split(absl::string_view text, SpecialTokenText special_token_text,
                                absl::Span<const TextSpan> plain_spans, Sink sink) const {
  size_t done = 0;  // the text before it has been handed out
  for (size_t pos = 0; pos < text.size();) {
    size_t begin = pos;
    const auto [token, next] = MatchAt(text, pos, special_token_text, plain_spans);
    pos = next;
    if (token == nullptr) continue;
    size_t end = next;
    if (token->single_word && !IsSingleWord(text, begin, end)) continue;
    if (token->lstrip) begin = WhiteSpaceBegin(text, done, begin);
    if (token->rstrip) end = WhiteSpaceEnd(text, end);
    if (done < begin) KVASIR_RETURN_IF_ERROR(sink(text.substr(done, begin - done), std::nullopt));
    KVASIR_RETURN_IF_ERROR(sink(text.substr(begin, end - begin), token->id));
    done = end;
  }
  if (done < text.size()) return sink(text.substr(done), std::nullopt);
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
