#include "coordinator/tokenizer/incremental_decoder.h"

#include <utility>

#include "coordinator/tokenizer/utf8.h"

namespace kvasir::coordinator {

std::string IncrementalDecoder::Push(int32_t id) {
  if (special_tokens_ == SpecialTokens::kSkip && tokenizer_->IsSpecial(id)) return "";
  const absl::string_view bytes = tokenizer_->TokenBytes(id);
  pending_.append(bytes.data(), bytes.size());
  std::string text;
  pending_.erase(0, AppendLossyUtf8(pending_, &text));
  return text;
}

std::string IncrementalDecoder::Flush() {
  if (pending_.empty()) return "";
  pending_.clear();
  return std::string(kReplacementCharacter);
}

}  // namespace kvasir::coordinator
