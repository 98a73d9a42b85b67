#include "coordinator/cli/check_text.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "coordinator/policy/limits.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

absl::Status CheckUtf8(absl::string_view what, absl::string_view text) {
  const std::optional<size_t> bad = FindInvalidUtf8(text);
  if (!bad.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is not UTF-8: byte %d is 0x%02x; convert it, from Latin-1 by: iconv -f "
                      "latin1 -t utf-8",
                      what, *bad, static_cast<unsigned char>(text[*bad])));
}

absl::Status CheckSize(const v1::GenerateRequest& request) {
  const size_t bytes = request.ByteSizeLong();
  if (bytes <= static_cast<size_t>(kMaxMessageBytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the request has ", bytes,
                                                 " bytes and a server takes at most ",
                                                 kMaxMessageBytes, "; shorten the prompt"));
}

}  // namespace kvasir::coordinator
