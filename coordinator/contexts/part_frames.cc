#include "coordinator/contexts/part_frames.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/policy/limits.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kLengthBytes = 4;

}  // namespace

std::string FrameOf(const v1::ContextPart& part) {
  std::string frame(kLengthBytes, '\0');
  const auto bytes = static_cast<uint32_t>(part.ByteSizeLong());
  for (size_t i = 0; i < kLengthBytes; ++i) frame[i] = static_cast<char>((bytes >> (8 * i)) & 0xff);
  part.AppendToString(&frame);
  return frame;
}

absl::StatusOr<std::optional<v1::ContextPart>> ReadFrame(
    absl::FunctionRef<size_t(size_t bytes, std::string& text)> read) {
  std::string head;
  const size_t got = read(kLengthBytes, head);
  if (got == 0) return std::optional<v1::ContextPart>();
  size_t bytes = 0;
  for (size_t i = 0; i < head.size(); ++i) {
    bytes |= size_t{static_cast<unsigned char>(head[i])} << (8 * i);
  }
  if (got < kLengthBytes || bytes > size_t{kMaxMessageBytes}) {
    return absl::InvalidArgumentError(
        absl::StrCat("a part of ", bytes, " bytes: this is no exported context, or a part of one"));
  }
  std::string text;
  v1::ContextPart part;
  if (read(bytes, text) < bytes || !part.ParseFromString(text)) {
    return absl::InvalidArgumentError("the last part is not whole; export the context again");
  }
  return std::optional<v1::ContextPart>(std::move(part));
}

}  // namespace kvasir::coordinator
