#include "proto/process/rare_warnings.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace kvasir::proto {
namespace {

constexpr std::chrono::seconds kInterval(10);

}  // namespace

RareWarnings::RareWarnings(std::string subject) : subject_(std::move(subject)) {}

void RareWarnings::Warn(absl::string_view text) {
  int64_t left_out = 0;
  {
    kernels::MutexLock lock(mu_);
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) {
      ++left_out_;
      return;
    }
    next_ = now + kInterval;
    left_out = std::exchange(left_out_, 0);
  }
  spdlog::warn("{}: {}{}", subject_, std::string(text),
               left_out == 0 ? "" : absl::StrCat(" (", left_out, " such lines left out)"));
}

}  // namespace kvasir::proto
