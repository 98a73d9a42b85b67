// How fast prompts were read lately. A value; thread-compatible.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace kvasir::coordinator {

class PrefillRate {
 public:
  // A step computed `tokens` prompt tokens in this time.
  void Add(int64_t tokens, absl::Duration time) {
    const double seconds = absl::ToDoubleSeconds(time);
    if (tokens <= 0 || seconds <= 0) return;
    tokens_ = kFade * tokens_ + static_cast<double>(tokens);
    seconds_ = kFade * seconds_ + seconds;
  }
  // False until a step was added.
  bool is_known() const { return tokens_ > 0; }
  // Time to read `tokens` tokens. Zero when the rate is not known.
  absl::Duration TimeFor(double tokens) const {
    return is_known() ? absl::Seconds(tokens * seconds_ / tokens_) : absl::ZeroDuration();
  }

 private:
  // Weight of earlier steps after one more step.
  static constexpr double kFade = 0.7;

  // Both sums fade.
  double tokens_ = 0;
  double seconds_ = 0;
};

}  // namespace kvasir::coordinator
