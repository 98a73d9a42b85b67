#include "coordinator/cli/progress_bar.h"

#include <algorithm>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvasir::coordinator {

std::string WithCommas(uint64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string ProgressLine(absl::string_view label, int64_t done, int64_t total,
                         std::optional<absl::Duration> eta) {
  constexpr int64_t kWidth = 30;
  done = std::clamp<int64_t>(done, 0, total);
  const int64_t filled = total > 0 ? done * kWidth / total : kWidth;
  std::string line = absl::StrFormat(
      "  %s [%s%s] %3d%%  %s / %s tokens", label, std::string(static_cast<size_t>(filled), '#'),
      std::string(static_cast<size_t>(kWidth - filled), '.'), total > 0 ? done * 100 / total : 100,
      WithCommas(static_cast<uint64_t>(done)), WithCommas(static_cast<uint64_t>(total)));
  if (eta.has_value()) {
    absl::StrAppend(&line, absl::StrFormat(", %.1f s left", absl::ToDoubleSeconds(*eta)));
  }
  return line;
}

ProgressBar::ProgressBar(std::FILE* stream, absl::string_view label)
    : stream_(stream), label_(label), is_terminal_(isatty(fileno(stream)) == 1) {}

ProgressBar::~ProgressBar() { Clear(); }

void ProgressBar::Show(int64_t done, int64_t total, std::optional<absl::Duration> eta) {
  if (!is_terminal_) return;
  std::fprintf(stream_, "\r\033[K%s", ProgressLine(label_, done, total, eta).c_str());
  std::fflush(stream_);
  drawn_ = true;
}

void ProgressBar::Clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stream_);
  std::fflush(stream_);
  drawn_ = false;
}

}  // namespace kvasir::coordinator
