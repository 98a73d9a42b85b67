#include "coordinator/tokenizer/incremental_decoder.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

std::string IncrementalDecoder::Push(int32_t id) {
  if (!tokenizer_->HasToken(id)) return "";
  if (special_tokens_ == SpecialTokens::kSkip && tokenizer_->IsSpecial(id)) return "";
  std::string text;
  const bool is_first = std::exchange(is_first_token_, false);
  absl::StrAppend(&pending_,
                  is_first ? tokenizer_->FirstTokenBytes(id) : tokenizer_->TokenBytes(id));
  pending_.erase(0, AppendLossyUtf8(pending_, &text, tokenizer_->replacement()));
  return Stripped(std::move(text));
}

std::string IncrementalDecoder::Flush() {
  std::string text;
  if (pending_.empty()) return text;
  const size_t count = tokenizer_->replacement() == Replacement::kByte ? pending_.size() : 1;
  for (size_t i = 0; i < count; ++i) absl::StrAppend(&text, kReplacementCharacter);
  pending_.clear();
  return Stripped(std::move(text));
}

std::string IncrementalDecoder::Stripped(std::string text) {
  const std::string& character = tokenizer_->decoder_rules().stripped;
  size_t begin = 0;
  while (may_strip_ > 0 && begin < text.size()) {
    const bool strips = absl::StartsWith(absl::string_view(text).substr(begin), character);
    if (strips) begin += character.size();
    may_strip_ = strips ? may_strip_ - 1 : 0;
  }
  return text.substr(begin);
}

}  // namespace kvasir::coordinator
