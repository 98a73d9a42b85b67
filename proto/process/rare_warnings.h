// Warnings whose cause comes from outside and may come as often as it likes: the log gets one line
// in 10 s, which says how many were left out since the last one. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"

namespace kvasir::proto {

class RareWarnings {
 public:
  // `subject` begins each line, e.g. the address of a port.
  explicit RareWarnings(std::string subject);
  void Warn(absl::string_view text) EXCLUDES(mu_);

 private:
  const std::string subject_;
  kernels::Mutex mu_;
  std::chrono::steady_clock::time_point next_ GUARDED_BY(mu_) = {};
  int64_t left_out_ GUARDED_BY(mu_) = 0;
};

}  // namespace kvasir::proto
