#include "coordinator/tokenizer/normalizer.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#include "coordinator/tokenizer/unicode/unicode.h"

namespace kvasir::coordinator {

std::string Normalizer::Run(absl::string_view text) const {
  std::string normalized(text);
  for (const Step& step : steps_) {
    if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!normalized.empty()) normalized.insert(0, prepend->text);
    } else if (const auto* replace = std::get_if<Replace>(&step)) {
      normalized = absl::StrReplaceAll(normalized, {{replace->pattern, replace->content}});
    } else {
      normalized = NormalizeNfc(normalized);
    }
  }
  return normalized;
}

}  // namespace kvasir::coordinator
