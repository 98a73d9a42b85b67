// Requests, cancellations and wishes to observe that have arrived since the engine loop last
// looked, in the order of their arrival. Bounded like the scheduler's queue, because a long step
// may keep the loop from looking. Called by the engine loop, under its mutex. Thread-compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"

#include "coordinator/request/request.h"
#include "coordinator/scheduling/scheduler.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

class Inbox {
 public:
  struct Cancellation {
    SequenceId id;
    absl::Status why;
  };
  struct Contents {
    std::vector<std::unique_ptr<Request>> submitted;
    int64_t submitted_tokens = 0;  // of their prompts
    std::vector<Cancellation> cancelled;
    absl::flat_hash_set<SequenceId> observed;
    std::vector<std::function<void(Scheduler*)>> calls;
  };

  // `bounds` outlives the inbox.
  explicit Inbox(const v1::SchedulerConfig& bounds) : bounds_(bounds) {}

  // RESOURCE_EXHAUSTED when there is no room for a request with a prompt of so many tokens.
  absl::Status CheckRoom(int64_t prompt_tokens) const;
  // Adds a request. REQUIRES: there is room for it.
  void Add(std::unique_ptr<Request> request);
  // Takes the request out again; null when there is none of this id.
  std::unique_ptr<Request> Take(SequenceId id);
  void AddCancellation(Cancellation cancellation);
  // Asks what the sequence selects next. The loop need not look for it.
  void AddObservation(SequenceId id) { contents_.observed.insert(id); }

  void AddCall(std::function<void(Scheduler*)> call) { contents_.calls.push_back(std::move(call)); }

  bool empty() const {
    return contents_.submitted.empty() && contents_.cancelled.empty() && contents_.calls.empty();
  }
  // Takes everything out.
  Contents TakeAll();

 private:
  const v1::SchedulerConfig& bounds_;
  Contents contents_;
};

}  // namespace kvasir::coordinator
