#include "coordinator/tokenizer/added_tokens.h"

#include <utility>

#include "coordinator/tokenizer/unicode.h"
#include "coordinator/tokenizer/utf8.h"
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

absl::Status AddedTokens::Split(absl::string_view text, SpecialTokenText special_token_text,
                                Sink sink) const {
  size_t done = 0;  // the text before it has been handed out
  for (size_t pos = 0; pos < text.size();) {
    if (!begins_token_[static_cast<uint8_t>(text[pos])]) {
      ++pos;
      continue;
    }
    const std::optional<int32_t> found = trie_.LongestPrefix(text.substr(pos));
    if (!found.has_value()) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(*found)];
    size_t begin = pos;
    size_t end = pos + token.content.size();
    pos = end;  // also when the match is refused below
    if (token.special && special_token_text == SpecialTokenText::kPlainText) continue;
    if (token.single_word && !IsSingleWord(text, begin, end)) continue;
    if (token.lstrip) begin = WhiteSpaceBegin(text, done, begin);
    if (token.rstrip) end = WhiteSpaceEnd(text, end);
    if (done < begin) KVASIR_RETURN_IF_ERROR(sink(text.substr(done, begin - done), std::nullopt));
    KVASIR_RETURN_IF_ERROR(sink(text.substr(begin, end - begin), token.id));
    done = end;
  }
  if (done < text.size()) return sink(text.substr(done), std::nullopt);
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
