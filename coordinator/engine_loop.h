// The thread that owns scheduler and worker group. It takes new requests and cancellations, plans,
// steps and hands out the results, and forms the group again when it is lost. It sleeps when there
// is nothing to do. Made by the server, called by the service's threads. Thread-safe.
//
// A request submitted here ends exactly once, whatever happens to the group or the server. It
// outlives the group: when that is lost, the request waits for the next one, in its place, and goes
// on at its next token. Meanwhile it can be cancelled and run out of time, and no new ones come.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

#include "coordinator/formed_group.h"
#include "coordinator/group/worker_group.h"
#include "coordinator/inbox.h"
#include "coordinator/live_requests.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/request/request.h"
#include "coordinator/scheduling/scheduler.h"
#include "coordinator/scheduling/survivors.h"
#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/index/block_listener.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

struct EngineLoopOptions {
  v1::SchedulerConfig scheduler;
  // Pause between attempts to form the group; doubles from first_retry to longest_retry while no
  // group answers a step.
  absl::Duration first_retry = absl::Milliseconds(100);
  absl::Duration longest_retry = absl::Seconds(10);
  // Time from Start after which WaitUntilReady gives up when an attempt to form a group fails.
  absl::Duration startup_timeout = absl::Seconds(30);
  // Checks that a group that has formed can serve the server's configuration; errors are permanent.
  std::function<absl::Status(const GroupInfo&)> check_group;
  // Called on the loop's thread with every change of whether requests are served.
  std::function<void(bool ready)> on_readiness;
  // Hears what the prefix cache holds; may be null. Outlives the loop.
  kvstore::BlockListener* block_listener = nullptr;
};

// State of the engine, for GetServerInfo.
struct EngineStatus {
  absl::Status serving = {};  // OK, or why requests are refused
  bool draining = false;
  std::optional<GroupInfo> group = {};  // the formed group
  SchedulerStats scheduler = {};        // of that group; without one, of the requests that wait
  v1::TierUsage tiers = {};             // after its last step
};

class EngineLoop {
 public:
  // The references outlive the loop.
  EngineLoop(EngineLoopOptions options, WorkerGroup& group, Clock& clock, Metrics& metrics);
  ~EngineLoop();  // calls Stop

  void Start();

  SequenceId NewSequenceId() { return SequenceId(next_sequence_.fetch_add(1)); }
  // Takes the request, which the loop answers from now on: with UNAVAILABLE at once when no group
  // is formed or the server drains. A router then has another server for it; a request that was
  // taken has not.
  void Submit(std::unique_ptr<Request> request) EXCLUDES(mu_);
  // Ends a request: at once, freeing its place, when no step has seen it, otherwise before the next
  // plan. Does nothing when the request has ended.
  void Cancel(SequenceId id, const absl::Status& why) EXCLUDES(mu_);

  // Asks for the pages that the request selects in its next step, for RunningRequests. Does nothing
  // when the request has ended.
  void Observe(SequenceId id) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    inbox_.AddObservation(id);
  }

  // Calls the function on the loop's thread, before the next plan and after what was cancelled
  // before: with the scheduler, or null while there is no group. Any thread.
  void Call(std::function<void(Scheduler*)> call) EXCLUDES(mu_) {
    {
      kernels::MutexLock lock(mu_);
      changed_.NotifyAll();
      if (!is_over_) return inbox_.AddCall(std::move(call));
    }
    call(nullptr);
  }

  // Returns the group that serves; UNAVAILABLE while none is formed and when the server drains.
  absl::StatusOr<GroupInfo> ServedGroup() const EXCLUDES(mu_);
  EngineStatus status() const EXCLUDES(mu_);
  // Returns OK once a group is formed. Returns the error of the last attempt when trying again will
  // not help, or has not helped within the startup timeout. Otherwise DEADLINE_EXCEEDED with the
  // last error; no other error has this code.
  absl::Status WaitUntilReady(TimePoint deadline) EXCLUDES(mu_);

  // Refuses new requests from now on.
  void Drain() EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    draining_ = true;
  }
  // Waits until nothing runs and the ranks know the outcome of all requests. False at the deadline.
  bool WaitUntilIdle(TimePoint deadline) EXCLUDES(mu_);
  // Ends running requests with `why`, ends the group, and joins the thread.
  void Stop(const absl::Status& why) EXCLUDES(mu_);

 private:
  enum class Wait { kForEvents, kNo };

  void Run() EXCLUDES(mu_);
  // Forms the group on a thread of its own, and looks after the requests that wait for it.
  absl::StatusOr<FormedGroup> Form() EXCLUDES(mu_);
  absl::Status Serve(FormedGroup formed);
  // Counts the loss, of which `why` tells; with it so many sequences were preempted.
  void OnLoss(const absl::Status& why, int64_t preempted) EXCLUDES(mu_);
  bool PauseBeforeRetry(absl::Duration retry, const absl::Status& why) EXCLUDES(mu_);
  // Cancels and ends requests that wait for a group, until `is_over` (called with mu_), `until` or
  // the end of the loop. False when the loop must end.
  bool LookAfterWaiting(absl::FunctionRef<bool()> is_over, std::optional<TimePoint> until)
      EXCLUDES(mu_);
  void WaitUntil(std::optional<TimePoint> deadline) REQUIRES(mu_);
  absl::Status ServeUntilLost();
  // Returns why no requests are served after the group has failed with `group`.
  absl::Status EndOf(const absl::Status& group) const EXCLUDES(mu_);
  // Returns the requests and cancellations since the last call. Waits for one, for a tier report or
  // until the scheduler's deadline. Returns an error when the group or the loop must end.
  absl::StatusOr<Inbox::Contents> AwaitArrivals(Wait wait) EXCLUDES(mu_);
  absl::Status UpdateTiers();
  void Apply(Inbox::Contents arrived);
  void EndOverdue();
  void EndSequence(SequenceId id, const absl::Status& why);
  void Dispatch(std::vector<Event> events);
  void PublishState() EXCLUDES(mu_);
  void SetReady(const GroupInfo& info) EXCLUDES(mu_);
  // Refuses requests from now on. Returns what has arrived before.
  Inbox::Contents SetNotReady(const GroupInfo& info, const absl::Status& why) EXCLUDES(mu_);
  void RequestEnded() EXCLUDES(mu_);
  // Ends what waits and what is in the inbox.
  void EndAll() EXCLUDES(mu_);
  absl::Status NotServing() const REQUIRES(mu_);

  const EngineLoopOptions options_;
  WorkerGroup& group_;
  Clock& clock_;
  Metrics& metrics_;
  std::atomic<int64_t> next_sequence_ = 0;
  TimePoint started_ = {};  // constant after Start

  // The loop's thread.
  LiveRequests requests_;
  std::unique_ptr<Scheduler> scheduler_;  // null while no group is formed
  Survivors survivors_;                   // wait meanwhile
  bool has_answered_ = false;             // the group has answered a step

  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;        // the inbox, tier reports, loss, stopping
  kernels::CondVar state_changed_;  // readiness, the number of requests
  Inbox inbox_ GUARDED_BY(mu_);
  std::optional<GroupInfo> info_ GUARDED_BY(mu_);
  bool is_announced_ GUARDED_BY(mu_) = false;  // info_ is set and on_readiness was called
  SchedulerStats scheduler_stats_ GUARDED_BY(mu_);
  v1::TierUsage tiers_ GUARDED_BY(mu_);
  absl::Status not_ready_because_ GUARDED_BY(mu_);
  bool is_retrying_ GUARDED_BY(mu_) = false;  // not_ready_because_ is the last attempt's error
  bool has_served_ GUARDED_BY(mu_) = false;   // a group was formed once
  absl::Status lost_ GUARDED_BY(mu_);
  std::optional<absl::StatusOr<FormedGroup>> formed_ GUARDED_BY(mu_);  // set when forming is done
  bool tier_reports_ GUARDED_BY(mu_) = false;                          // there are reports to take
  bool resting_ GUARDED_BY(mu_) = true;  // there is nothing to tell the ranks
  bool draining_ GUARDED_BY(mu_) = false;
  std::optional<absl::Status> stop_ GUARDED_BY(mu_);
  bool is_over_ GUARDED_BY(mu_) = false;       // nothing is taken from the inbox any more
  int64_t live_requests_ GUARDED_BY(mu_) = 0;  // submitted, not ended

  std::thread thread_;  // last member: it uses all above
};

}  // namespace kvasir::coordinator
