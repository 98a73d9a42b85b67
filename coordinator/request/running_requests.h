// The requests that have not ended: their ids, which are unique among them, and how far they are.
// Requests write it as their events come, so that it can be listed without the engine's thread.
// Made by the server. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// Pages that a request selected in one of its steps.
struct ObservedSelections {
  TimePoint at = {};
  v1::SelectionMap map = {};  // without counts where the ranks cannot tell
};

struct RunningRequest {
  std::string id;
  SequenceId sequence = {};
  std::string policy = {};  // name
  int64_t prompt_tokens = 0;
  int64_t max_tokens = 0;
  TimePoint arrived = {};

  // Set as events come. The last ones count.
  std::optional<TimePoint> admitted_at = {};
  TimePoint progress_at = {};
  int64_t processed_tokens = 0;
  int64_t cached_tokens = 0;
  std::optional<absl::Duration> eta = {};  // to the first token, at progress_at
  std::optional<TimePoint> first_token_at = {};
  int64_t answer_tokens = 0;
  bool resumes = false;  // its worker group was lost after the last event
  AttentionSoFar attention = {};
  std::shared_ptr<const ObservedSelections> selections = {};  // null: never observed
};

class RunningRequests {
 public:
  // A request's place in the list, until it is destroyed. The list outlives it.
  class Lease {
   public:
    Lease(RunningRequests& requests, int64_t number) : requests_(requests), number_(number) {}
    ~Lease() { requests_.Release(number_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    void OnProgress(const ProgressEvent& event, TimePoint now);
    void OnToken(const TokenEvent& event, TimePoint now);
    void OnGroupLost();
    void OnSelections(v1::SelectionMap map, TimePoint now);

   private:
    RunningRequests& requests_;
    const int64_t number_;
  };

  // ALREADY_EXISTS while a request with this id runs.
  absl::StatusOr<std::unique_ptr<Lease>> Acquire(RunningRequest request) EXCLUDES(mu_);
  // Returns the request with this id; NOT_FOUND when none runs.
  absl::StatusOr<RunningRequest> Find(const std::string& id) const EXCLUDES(mu_);
  // Returns the oldest `most` requests, by age.
  std::vector<v1::RequestInfo> List(size_t most, TimePoint now) const EXCLUDES(mu_);

 private:
  void Release(int64_t number) EXCLUDES(mu_);

  mutable kernels::Mutex mu_;
  int64_t next_ GUARDED_BY(mu_) = 0;
  std::map<int64_t, RunningRequest> requests_ GUARDED_BY(mu_);  // by age
  absl::flat_hash_set<std::string> ids_ GUARDED_BY(mu_);        // theirs
};

}  // namespace kvasir::coordinator
