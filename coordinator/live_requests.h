// The requests that the engine loop has to answer: each gets its events, and says when it has taken
// too long. Owned and called by the engine loop's thread. Thread-compatible.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/request/request.h"
#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/time/clock.h"

namespace kvasir::coordinator {

class LiveRequests {
 public:
  // A request may take `longest` from its arrival. `on_end` is called after each end.
  LiveRequests(absl::Duration longest, std::function<void()> on_end)
      : longest_(longest), on_end_(std::move(on_end)) {}

  bool empty() const { return requests_.empty(); }
  void Add(std::unique_ptr<Request> request);

  // Tells the event to its request. The request, if its text now ends in a stop string.
  std::optional<SequenceId> OnEvent(Event event, TimePoint now);
  // Tells all requests that they wait for the next worker group.
  void OnGroupLost();

  // Those that have taken longer than they may.
  std::vector<SequenceId> Overdue(TimePoint now) const;
  // The status that they end with.
  absl::Status TooLate() const;
  // The earliest time at which one of them is overdue.
  std::optional<TimePoint> NextOverdue() const;

 private:
  const absl::Duration longest_;
  const std::function<void()> on_end_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Request>> requests_;
};

}  // namespace kvasir::coordinator
