// A progress bar on one line of a terminal. Prints nothing to other streams. Thread-compatible.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvasir::coordinator {

class ProgressBar {
 public:
  // Draws on `stream` when it is a terminal. `label` names the work.
  ProgressBar(std::FILE* stream, absl::string_view label);
  ~ProgressBar();  // clears the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Show(int64_t done, int64_t total, std::optional<absl::Duration> eta);
  void Clear();

 private:
  std::FILE* const stream_;
  const std::string label_;
  const bool is_terminal_;
  bool drawn_ = false;
};

// Returns e.g. "  reading prompt [#####.....]  50%  4,096 / 8,192 tokens, 3.2 s left".
std::string ProgressLine(absl::string_view label, int64_t done, int64_t total,
                         std::optional<absl::Duration> eta);

// Returns e.g. "1,234,567".
std::string WithCommas(uint64_t number);

}  // namespace kvasir::coordinator
