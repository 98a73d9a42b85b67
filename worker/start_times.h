// How long each stage of a start took, for one line of the log. Thread-compatible.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvasir::worker {

class StartTimes {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StartTimes(Clock::time_point begin) : begin_(begin) {}

  // Ends the current stage and begins this one. Does nothing if this is the current stage.
  void Enter(absl::string_view stage, Clock::time_point now = Clock::now());
  // Sets the number of bytes that a stage moved.
  void SetBytes(absl::string_view stage, int64_t bytes);
  // Returns "5.31 s: weights 3.14 (16.1 GB at 5.1 GB/s), KV 0.92": the total, then the stages in
  // order.
  std::string Summary(Clock::time_point now = Clock::now()) const;

 private:
  struct Stage {
    std::string name;
    Clock::time_point begin;
    int64_t bytes = 0;
  };

  Clock::time_point begin_;
  std::vector<Stage> stages_;
};

}  // namespace kvasir::worker
