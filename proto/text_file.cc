#include "proto/text_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::proto {
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

absl::StatusOr<std::string> ReadTextFile(absl::string_view flag, const std::string& path) {
  const std::string what = absl::StrCat(flag, " ", path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat(what, " cannot be opened: ", std::strerror(errno)));
  }
  return ReadAll(what, file.get());
}

absl::StatusOr<std::string> ReadStandardInput() { return ReadAll("standard input", stdin); }

}  // namespace kvasir::proto
