// The sequences of a worker group that is lost, until the next group takes them over: with their
// tokens and their place, without blocks. Counts how often a sequence was on the ranks of a group
// that was lost, and ends one that may be the cause. Made by the scheduler of the lost group, kept
// by the engine loop. Thread-compatible.
//
// Progress. A sequence makes progress with every new token. Reading its prompt further is none: all
// that it has read is gone with the group, so nothing would say that it ends.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/scheduling/scheduler_state.h"
#include "coordinator/scheduling/sequence.h"
#include "coordinator/time/clock.h"

namespace kvasir::coordinator {

class Survivors {
 public:
  // A sequence that was on the ranks of so many lost groups in a row, which got no further, ends.
  static constexpr int64_t kMostLosses = 3;

  Survivors() = default;
  // `sequences` wait, the oldest first. `unmeasured`: why the ranks measured no attention mass.
  Survivors(std::vector<std::unique_ptr<Sequence>> sequences, v1::MassUnmeasured unmeasured)
      : sequences_(std::move(sequences)), unmeasured_(unmeasured) {}

  // Counts the loss, of which `why` tells. Ends the sequences that have seen too many.
  std::vector<Event> CountLoss(const absl::Status& why, TimePoint now);
  // Ends a sequence for a reason from outside. Nothing when it has ended already.
  std::optional<FinishEvent> Cancel(SequenceId id, const absl::Status& why, TimePoint now);
  std::vector<Event> EndAll(const absl::Status& why, TimePoint now);
  // Gives them to the next scheduler.
  std::vector<std::unique_ptr<Sequence>> TakeAll() { return std::exchange(sequences_, {}); }

  // All of them wait.
  SchedulerStats stats() const;

 private:
  FinishEvent End(const Sequence& sequence, const absl::Status& why, TimePoint now) const;

  std::vector<std::unique_ptr<Sequence>> sequences_;  // the oldest first
  v1::MassUnmeasured unmeasured_ = v1::MASS_UNMEASURED_UNSPECIFIED;
};

}  // namespace kvasir::coordinator
