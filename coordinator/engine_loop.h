// The thread that owns scheduler and worker group: takes new and cancelled requests, plans, steps,
// and hands out what came of it; forms the group again when it is lost. Made by the server, called
// by the service's threads. It sleeps whenever there is nothing to do. Thread-safe.
//
// A request submitted here ends exactly once, whatever happens to the group or the server.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

#include "coordinator/clock.h"
#include "coordinator/metrics.h"
#include "coordinator/request.h"
#include "coordinator/scheduler.h"
#include "coordinator/worker_group.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

struct EngineLoopOptions {
  v1::SchedulerConfig scheduler;
  // Between attempts to form the group; doubles from the first to the second.
  absl::Duration first_retry = absl::Milliseconds(100);
  absl::Duration longest_retry = absl::Seconds(10);
  // Since Start: a first group that fails to form after it is not worth waiting for.
  absl::Duration startup_timeout = absl::Seconds(30);
  // Whether a group that has formed can serve what the server promises; an error is permanent.
  std::function<absl::Status(const GroupInfo&)> check_group;
  // Told with every change whether requests are served; on the loop's thread.
  std::function<void(bool ready)> on_readiness;
};

// What the engine does now, for those who ask how the server is.
struct EngineStatus {
  absl::Status serving = {};  // OK, or why requests are refused
  bool draining = false;
  std::optional<GroupInfo> group = {};  // the formed one
  SchedulerStats scheduler = {};        // of that group
  v1::TierUsage tiers = {};             // after its last step
};

class EngineLoop {
 public:
  // The references outlive the loop.
  EngineLoop(EngineLoopOptions options, WorkerGroup& group, Clock& clock, Metrics& metrics);
  ~EngineLoop();  // Stop

  void Start();

  SequenceId NewSequenceId() { return SequenceId(next_sequence_.fetch_add(1)); }
  // Takes the request: it is answered by the loop from here on, with UNAVAILABLE at once when no
  // group is formed or the server drains.
  void Submit(std::unique_ptr<Request> request) EXCLUDES(mu_);
  // A request that no step has seen ends at once and leaves its place to another one; others end
  // before the next plan. Nothing when the request has ended.
  void Cancel(SequenceId id, const absl::Status& why) EXCLUDES(mu_);

  // What is served now; UNAVAILABLE while no group is formed and when the server drains.
  absl::StatusOr<GroupInfo> ServedGroup() const EXCLUDES(mu_);
  EngineStatus status() const EXCLUDES(mu_);
  // OK once a group is formed. Before that, why the last attempt failed, if trying again will not
  // mend it or has not within the startup timeout; else DEADLINE_EXCEEDED with the last error, and
  // no other error has this code.
  absl::Status WaitUntilReady(TimePoint deadline) EXCLUDES(mu_);

  // No new requests from here on.
  void Drain() EXCLUDES(mu_);
  // Nothing runs, and the ranks have heard what became of it. False when that is not so at the
  // deadline.
  bool WaitUntilIdle(TimePoint deadline) EXCLUDES(mu_);
  // Ends what still runs with `why` and the group, and joins the thread.
  void Stop(const absl::Status& why) EXCLUDES(mu_);

 private:
  struct Cancellation {
    SequenceId id;
    absl::Status why;
  };
  struct Commands {
    std::vector<std::unique_ptr<Request>> submitted;
    int64_t submitted_tokens = 0;  // of their prompts
    std::vector<Cancellation> cancelled;
  };
  enum class Wait { kForEvents, kNo };
  struct Formed {
    GroupInfo info;
    std::unique_ptr<Scheduler> scheduler;
  };

  // A request that no step has seen; null when there is none of this id.
  std::unique_ptr<Request> TakeSubmitted(SequenceId id) REQUIRES(mu_);
  void Run() EXCLUDES(mu_);
  absl::StatusOr<Formed> Form();
  absl::Status Serve(Formed formed);
  bool PauseBeforeRetry(absl::Duration retry, const absl::Status& why) EXCLUDES(mu_);
  absl::Status ServeUntilLost(Scheduler& scheduler);
  // What requests end with when the group has failed so.
  absl::Status EndOf(const absl::Status& group) const EXCLUDES(mu_);
  // The commands since the last call; waits for one, for a tier report or until the scheduler's
  // deadline. An error when the group or the loop must end.
  absl::StatusOr<Commands> TakeCommands(Wait wait, const Scheduler& scheduler) EXCLUDES(mu_);
  absl::Status HearOfTiers(Scheduler& scheduler);
  void Apply(Commands commands, Scheduler& scheduler);
  void EndOverdue(Scheduler& scheduler);
  void Dispatch(std::vector<Event> events, Scheduler& scheduler);
  void OnFinish(FinishEvent event);
  void PublishState(const Scheduler& scheduler) EXCLUDES(mu_);
  void SetReady(const GroupInfo& info) EXCLUDES(mu_);
  void SetNotReady(const GroupInfo& info, const absl::Status& why) EXCLUDES(mu_);
  void FailQueued(const absl::Status& why) EXCLUDES(mu_);
  void RequestEnded() EXCLUDES(mu_);
  absl::Status NotServing() const REQUIRES(mu_);
  // What waits between two steps is bounded like what waits in the scheduler.
  absl::Status CheckInbox(int64_t prompt_tokens) const REQUIRES(mu_);

  const EngineLoopOptions options_;
  WorkerGroup& group_;
  Clock& clock_;
  Metrics& metrics_;
  std::atomic<int64_t> next_sequence_ = 0;
  TimePoint started_ = {};  // constant after Start

  // The loop's thread.
  absl::flat_hash_map<SequenceId, std::unique_ptr<Request>> requests_;

  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;        // commands, tier reports, loss, stopping
  kernels::CondVar state_changed_;  // readiness, the number of requests
  Commands commands_ GUARDED_BY(mu_);
  std::optional<GroupInfo> info_ GUARDED_BY(mu_);
  bool is_announced_ GUARDED_BY(mu_) = false;  // there is info_, and on_readiness has heard of it
  SchedulerStats scheduler_stats_ GUARDED_BY(mu_);
  v1::TierUsage tiers_ GUARDED_BY(mu_);
  absl::Status not_ready_because_ GUARDED_BY(mu_);
  bool is_retrying_ GUARDED_BY(mu_) = false;  // not_ready_because_ is why an attempt failed
  bool has_served_ GUARDED_BY(mu_) = false;   // a group was formed once
  absl::Status lost_ GUARDED_BY(mu_);
  bool tier_reports_ GUARDED_BY(mu_) = false;  // there are some to take
  bool resting_ GUARDED_BY(mu_) = true;        // nothing is left to tell the ranks
  bool draining_ GUARDED_BY(mu_) = false;
  std::optional<absl::Status> stop_ GUARDED_BY(mu_);
  int64_t live_requests_ GUARDED_BY(mu_) = 0;  // submitted, not ended

  std::thread thread_;  // last: it uses everything above
};

}  // namespace kvasir::coordinator
