#include "coordinator/cli/read_text.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "coordinator/policy/limits.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

namespace {

absl::StatusOr<std::string> ReadAll(absl::string_view what, std::FILE* file) {
  std::string text;
  char chunk[1 << 16];
  while (const size_t size = std::fread(chunk, 1, sizeof(chunk), file)) text.append(chunk, size);
  if (std::ferror(file) == 0) return text;
  return absl::InvalidArgumentError(absl::StrCat(what, " cannot be read: ", std::strerror(errno),
                                                 " after ", text.size(), " bytes; give a file"));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(absl::string_view flag, const std::string& path) {
  const std::string what = absl::StrCat(flag, " ", path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat(what, " cannot be opened: ", std::strerror(errno)));
  }
  return ReadAll(what, file.get());
}

absl::StatusOr<std::string> ReadStandardInput() { return ReadAll("standard input", stdin); }

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
