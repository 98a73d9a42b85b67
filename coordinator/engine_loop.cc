#include "coordinator/engine_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
using kernels::MutexLock;

EngineLoop::EngineLoop(EngineLoopOptions options, WorkerGroup& group, Clock& clock,
                       Metrics& metrics)
    : options_(std::move(options)),
      group_(group),
      clock_(clock),
      metrics_(metrics),
      requests_(absl::Seconds(options_.scheduler.max_request_time()), [this] { RequestEnded(); }),
      inbox_(options_.scheduler),
      not_ready_because_(absl::UnavailableError("the worker group is being formed")) {
  group_.SetLossCallback([this](const absl::Status& why) {
    MutexLock lock(mu_);
    lost_ = why;
    changed_.NotifyAll();
  });
  group_.SetProgressCallback([this](const std::string& what) {
    MutexLock lock(mu_);
    if (is_retrying_) return;  // the error before the retry tells more
    not_ready_because_ = absl::UnavailableError(what);
  });
  group_.SetTierReportCallback([this] {
    MutexLock lock(mu_);
    tier_reports_ = true;
    changed_.NotifyAll();
  });
}

EngineLoop::~EngineLoop() { Stop(absl::UnavailableError("the server is shutting down")); }

void EngineLoop::Start() {
  started_ = clock_.Now();
  thread_ = proto::NamedThread("engine", [this] { Run(); });
}

// --- any thread ---------------------------------------------------------------------------------

void EngineLoop::Submit(std::unique_ptr<Request> request) {
  absl::Status refused;
  {
    MutexLock lock(mu_);
    refused = NotServing();
    if (refused.ok()) refused = inbox_.CheckRoom(request->given_tokens());
    if (refused.ok()) {
      ++live_requests_;
      inbox_.Add(std::move(request));
      changed_.NotifyAll();
    }
  }
  if (!refused.ok()) request->Refuse(refused, clock_.Now());
}

absl::Status EngineLoop::NotServing() const {
  if (draining_ || stop_.has_value()) {
    return absl::UnavailableError("the server is draining; use another one");
  }
  if (info_.has_value()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("no worker group is formed: ", not_ready_because_.message()));
}

void EngineLoop::Cancel(SequenceId id, const absl::Status& why) {
  std::unique_ptr<Request> request;
  {
    MutexLock lock(mu_);
    if (stop_.has_value()) return;  // every request has ended or is about to
    request = inbox_.Take(id);
    if (request == nullptr) {
      inbox_.AddCancellation({.id = id, .why = why});
      changed_.NotifyAll();
      return;
    }
  }
  request->Finish(why, v1::Finish(), clock_.Now());
  RequestEnded();
}

absl::StatusOr<GroupInfo> EngineLoop::ServedGroup() const {
  MutexLock lock(mu_);
  KVASIR_RETURN_IF_ERROR(NotServing());
  return *info_;
}

EngineStatus EngineLoop::status() const {
  MutexLock lock(mu_);
  return {.serving = NotServing(),
          .draining = draining_ || stop_.has_value(),
          .group = info_,
          .scheduler = scheduler_stats_,
          .tiers = tiers_};
}

absl::Status EngineLoop::WaitUntilReady(TimePoint deadline) {
  MutexLock lock(mu_);
  while (!is_announced_) {
    if (stop_.has_value()) return *stop_;
    if (IsPermanent(not_ready_because_)) return not_ready_because_;
    const TimePoint now = clock_.Now();
    if (!has_served_ && is_retrying_ && now >= After(started_, options_.startup_timeout)) {
      return absl::UnavailableError(absl::StrCat(
          "no worker group was formed within ", absl::FormatDuration(options_.startup_timeout),
          " (--startup-timeout): ", not_ready_because_.message()));
    }
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("not ready: ", not_ready_because_.message()));
    }
    clock_.Wait(mu_, state_changed_, deadline);
  }
  return absl::OkStatus();
}

bool EngineLoop::WaitUntilIdle(TimePoint deadline) {
  MutexLock lock(mu_);
  const auto idle = [this]() REQUIRES(mu_) { return live_requests_ == 0 && resting_; };
  while (!idle() && clock_.Now() < deadline) clock_.Wait(mu_, state_changed_, deadline);
  return idle();
}

void EngineLoop::Stop(const absl::Status& why) {
  {
    MutexLock lock(mu_);
    if (!stop_.has_value()) stop_ = why;
    changed_.NotifyAll();
    state_changed_.NotifyAll();
  }
  group_.Interrupt();
  if (thread_.joinable()) thread_.join();
}

// --- the loop's thread --------------------------------------------------------------------------

void EngineLoop::Run() {
  absl::Duration retry = options_.first_retry;
  for (;;) {
    {
      MutexLock lock(mu_);
      lost_ = absl::OkStatus();
    }
    absl::StatusOr<FormedGroup> formed = Form();
    absl::Status why = formed.status();
    if (formed.ok()) {
      const TimePoint since = clock_.Now();
      why = Serve(*std::move(formed));
      // A group that is lost before it is of use counts like one that cannot be formed.
      const bool was_of_use =
          has_answered_ || Between(since, clock_.Now()) > options_.longest_retry;
      if (was_of_use) retry = options_.first_retry;
    }
    group_.Disband();
    if (!PauseBeforeRetry(retry, why)) break;
    retry = std::min(2 * retry, options_.longest_retry);
  }
  EndAll();
  KVASIR_CHECK(requests_.empty());
}

void EngineLoop::EndAll() {
  Inbox::Contents left;
  absl::Status stopped;
  {
    MutexLock lock(mu_);
    is_over_ = true;
    left = inbox_.TakeAll();
    stopped = *stop_;
  }
  for (const auto& call : left.calls) call(nullptr);
  Dispatch(survivors_.EndAll(stopped, clock_.Now()));
}

absl::StatusOr<FormedGroup> EngineLoop::Form() {
  std::thread forming = proto::NamedThread("forming", [this] {
    absl::StatusOr<FormedGroup> formed =
        FormGroup(group_, {.scheduler = options_.scheduler,
                           .check_group = options_.check_group,
                           .block_listener = options_.block_listener});
    MutexLock lock(mu_);
    formed_ = std::move(formed);
    changed_.NotifyAll();
  });
  LookAfterWaiting([this]() REQUIRES(mu_) { return formed_.has_value(); }, std::nullopt);
  forming.join();  // soon, as Stop interrupts it
  MutexLock lock(mu_);
  return *std::exchange(formed_, std::nullopt);
}

// Serves until the group is lost or the loop stops; returns why.
absl::Status EngineLoop::Serve(FormedGroup formed) {
  scheduler_ = std::move(formed.scheduler);
  has_answered_ = false;
  if (absl::Status heard = UpdateTiers(); !heard.ok()) {
    scheduler_.reset();
    return heard;
  }
  SetReady(formed.info);
  Dispatch(scheduler_->TakeOver(std::exchange(survivors_, {}), clock_.Now()));
  const absl::Status why = ServeUntilLost();
  group_.Disband();
  Apply(SetNotReady(formed.info, why));
  survivors_ = scheduler_->GiveUp();
  PublishState();
  const int64_t preempted = scheduler_->stats().preempted_loss;
  scheduler_.reset();  // and with it the index of what the group had cached
  OnLoss(why, preempted);
  return why;
}

void EngineLoop::OnLoss(const absl::Status& why, int64_t preempted) {
  {
    MutexLock lock(mu_);
    if (stop_.has_value()) return;  // then all of them end
  }
  std::vector<Event> ended = survivors_.CountLoss(why, clock_.Now());
  spdlog::warn(
      "lost the worker group, forming it again: {}; {} sequences preempted, {} requests wait for "
      "it, {} ended after {} losses in which they got no further",
      std::string(why.message()), preempted, survivors_.stats().waiting, ended.size(),
      Survivors::kMostLosses);
  Dispatch(std::move(ended));
  requests_.OnGroupLost();
}

// Returns false when the loop stops.
bool EngineLoop::PauseBeforeRetry(absl::Duration retry, const absl::Status& why) {
  {
    MutexLock lock(mu_);
    if (stop_.has_value()) return false;
    // A reason is logged once: here, where a group was lost, or by the server when it ends with it
    // before it has served.
    const bool is_told = is_retrying_ && why == not_ready_because_;
    const bool is_last = IsPermanent(why) && !has_served_;
    if (!is_told && !is_last) spdlog::warn("no worker group, trying again: {}", why.ToString());
    not_ready_because_ = why;
    is_retrying_ = true;
    state_changed_.NotifyAll();
  }
  return LookAfterWaiting([] { return false; }, After(clock_.Now(), retry));
}

bool EngineLoop::LookAfterWaiting(absl::FunctionRef<bool()> is_over,
                                  std::optional<TimePoint> until) {
  for (;;) {
    const std::optional<TimePoint> overdue = requests_.NextOverdue();
    const auto has_passed = [this](std::optional<TimePoint> time) {
      return time.has_value() && clock_.Now() >= *time;
    };
    Inbox::Contents arrived;
    {
      MutexLock lock(mu_);
      while (!stop_.has_value() && !is_over() && !has_passed(until) && !has_passed(overdue) &&
             inbox_.empty()) {
        WaitUntil(Earlier(until, overdue));
      }
      if (stop_.has_value()) return false;
      if (is_over() || has_passed(until)) return true;
      arrived = inbox_.TakeAll();
    }
    Apply(std::move(arrived));
    EndOverdue();
  }
}

// Waits for a change, or for the time.
void EngineLoop::WaitUntil(std::optional<TimePoint> deadline) {
  if (deadline.has_value()) {
    clock_.Wait(mu_, changed_, *deadline);
  } else {
    changed_.Wait(mu_);
  }
}

// Steps until the group is lost or the loop must stop. Returns why.
absl::Status EngineLoop::ServeUntilLost() {
  Wait wait = Wait::kNo;  // requests may have come with the group before
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(Inbox::Contents arrived, AwaitArrivals(wait));
    if (const absl::Status heard = UpdateTiers(); !heard.ok()) return ForClients(heard);
    Apply(std::move(arrived));
    EndOverdue();
    Scheduler::Planned planned = scheduler_->NextPlan(clock_.Now());
    Dispatch(std::move(planned.events));
    const bool is_sent = planned.plan.has_value();
    if (is_sent) KVASIR_RETURN_IF_ERROR(EndOf(group_.Send(*planned.plan)));
    wait = scheduler_->unanswered_plans() > 0 ? Wait::kNo : Wait::kForEvents;
    const bool may_plan = is_sent && scheduler_->unanswered_plans() < Scheduler::kMostPlans;
    if (may_plan || wait == Wait::kForEvents) continue;
    absl::StatusOr<v1::StepReply> reply = group_.AwaitReply();
    if (!reply.ok()) return EndOf(reply.status());
    {
      MutexLock lock(mu_);
      tiers_ = reply->tiers();
    }
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(*reply, clock_.Now());
    if (!events.ok()) return ForClients(events.status());
    has_answered_ = true;
    Dispatch(*std::move(events));
  }
}

absl::Status EngineLoop::EndOf(const absl::Status& group) const {
  if (group.ok()) return group;
  MutexLock lock(mu_);
  return stop_.has_value() ? *stop_ : ForClients(group);
}

absl::StatusOr<Inbox::Contents> EngineLoop::AwaitArrivals(Wait wait) {
  const std::optional<TimePoint> deadline = scheduler_->NextDeadline();
  MutexLock lock(mu_);
  for (;;) {
    if (stop_.has_value()) return *stop_;
    if (!lost_.ok()) return ForClients(lost_);
    const bool late = deadline.has_value() && clock_.Now() >= *deadline;
    if (!inbox_.empty() || wait == Wait::kNo || tier_reports_ || late) {
      resting_ = false;
      return inbox_.TakeAll();
    }
    resting_ = true;
    state_changed_.NotifyAll();
    WaitUntil(deadline);
  }
}

absl::Status EngineLoop::UpdateTiers() {
  {
    MutexLock lock(mu_);
    if (!std::exchange(tier_reports_, false)) return absl::OkStatus();
  }
  const TimePoint now = clock_.Now();
  for (const RankTierReport& from : group_.TakeTierReports()) {
    KVASIR_RETURN_IF_ERROR(scheduler_->OnTierReport(from.rank, from.report, now));
  }
  return absl::OkStatus();
}

// Cancels before it adds, so that cancelled requests make room for new ones.
void EngineLoop::Apply(Inbox::Contents arrived) {
  for (const Inbox::Cancellation& cancellation : arrived.cancelled) {
    EndSequence(cancellation.id, cancellation.why);
  }
  for (std::unique_ptr<Request>& request : arrived.submitted) {  // none while no group is formed
    const absl::Status added = scheduler_->Add(request->TakeSpec());
    if (added.ok()) {
      requests_.Add(std::move(request));
    } else {
      request->Refuse(added, clock_.Now());
      RequestEnded();
    }
  }
  for (const SequenceId id : arrived.observed) {
    if (scheduler_ != nullptr) scheduler_->Observe(id);
  }
  for (const auto& call : arrived.calls) call(scheduler_.get());
}

// Called before every plan. While there are requests there are steps, so none is overdue for long.
void EngineLoop::EndOverdue() {
  for (const SequenceId id : requests_.Overdue(clock_.Now())) EndSequence(id, requests_.TooLate());
}

void EngineLoop::EndSequence(SequenceId id, const absl::Status& why) {
  const TimePoint now = clock_.Now();
  std::optional<FinishEvent> finish =
      scheduler_ != nullptr ? scheduler_->Cancel(id, why, now) : survivors_.Cancel(id, why, now);
  if (!finish.has_value()) return;
  PublishState();
  requests_.OnEvent(*std::move(finish), now);
}

void EngineLoop::Dispatch(std::vector<Event> events) {
  PublishState();  // before clients see the events
  const TimePoint now = clock_.Now();
  for (Event& event : events) {
    const std::optional<SequenceId> stopped = requests_.OnEvent(std::move(event), now);
    if (!stopped.has_value()) continue;
    // When it was the last token anyway, the next event is its end.
    std::optional<FinishEvent> finish = scheduler_->StopEarly(*stopped, now);
    PublishState();
    if (finish.has_value()) requests_.OnEvent(*std::move(finish), now);
  }
}

void EngineLoop::RequestEnded() {
  MutexLock lock(mu_);
  --live_requests_;
  state_changed_.NotifyAll();
}

void EngineLoop::PublishState() {
  const SchedulerStats stats = scheduler_ != nullptr ? scheduler_->stats() : survivors_.stats();
  metrics_.SchedulerState(stats);
  MutexLock lock(mu_);
  LogSetAside(scheduler_stats_, stats);
  scheduler_stats_ = stats;
}

void EngineLoop::SetReady(const GroupInfo& info) {
  Announce(info, metrics_);
  {
    MutexLock lock(mu_);
    info_ = info;
    tiers_.Clear();
    not_ready_because_ = absl::OkStatus();
    is_retrying_ = false;
    has_served_ = true;
  }
  if (options_.on_readiness) options_.on_readiness(true);
  MutexLock lock(mu_);
  is_announced_ = true;
  state_changed_.NotifyAll();
}

Inbox::Contents EngineLoop::SetNotReady(const GroupInfo& info, const absl::Status& why) {
  Inbox::Contents arrived;
  {
    MutexLock lock(mu_);
    arrived = inbox_.TakeAll();
    resting_ = true;
    info_.reset();
    is_announced_ = false;
    not_ready_because_ = why;
    is_retrying_ = true;
    if (!stop_.has_value()) metrics_.GroupLost();
  }
  for (size_t i = 0; i < info.addresses.size(); ++i) {
    metrics_.WorkerUp(static_cast<int64_t>(i), false);
  }
  if (options_.on_readiness) options_.on_readiness(false);
  return arrived;
}

}  // namespace kvasir::coordinator
