#include "worker/start_times.h"

#include "absl/strings/str_format.h"

namespace kvasir::worker {
namespace {

double Seconds(StartTimes::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void StartTimes::Enter(absl::string_view stage, Clock::time_point now) {
  if (!stages_.empty() && stages_.back().name == stage) return;
  stages_.push_back({.name = std::string(stage), .begin = now});
}

void StartTimes::SetBytes(absl::string_view stage, int64_t bytes) {
  for (Stage& known : stages_) {
    if (known.name == stage) known.bytes = bytes;
  }
}

std::string StartTimes::Summary(Clock::time_point now) const {
  std::string text = absl::StrFormat("%.2f s", Seconds(now - begin_));
  for (size_t i = 0; i < stages_.size(); ++i) {
    const Stage& stage = stages_[i];
    const Clock::time_point end = i + 1 < stages_.size() ? stages_[i + 1].begin : now;
    const double took = Seconds(end - stage.begin);
    absl::StrAppendFormat(&text, "%s %s %.2f", i == 0 ? ":" : ",", stage.name, took);
    if (stage.bytes == 0 || took <= 0) continue;
    const double gb = 1e-9 * static_cast<double>(stage.bytes);
    absl::StrAppendFormat(&text, " (%.1f GB at %.1f GB/s)", gb, gb / took);
  }
  return text;
}

}  // namespace kvasir::worker
