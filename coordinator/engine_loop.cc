#include "coordinator/engine_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

// Returns the status of requests that end with their group: one of two codes, without details.
absl::Status ForClients(const absl::Status& lost) {
  const absl::StatusCode code =
      absl::IsInternal(lost) ? absl::StatusCode::kInternal : absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat("the worker group failed: ", lost.message()));
}

// True when trying again will not help.
bool IsPermanent(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ||
         absl::IsNotFound(status) || absl::IsResourceExhausted(status) ||
         absl::IsUnimplemented(status) || absl::IsUnauthenticated(status) ||
         absl::IsPermissionDenied(status);
}

}  // namespace

EngineLoop::EngineLoop(EngineLoopOptions options, WorkerGroup& group, Clock& clock,
                       Metrics& metrics)
    : options_(std::move(options)),
      group_(group),
      clock_(clock),
      metrics_(metrics),
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
  thread_ = std::thread([this] { Run(); });
}

// --- any thread ---------------------------------------------------------------------------------

void EngineLoop::Submit(std::unique_ptr<Request> request) {
  absl::Status refused;
  {
    MutexLock lock(mu_);
    refused = NotServing();
    if (refused.ok()) refused = inbox_.CheckRoom(request->prompt_tokens());
    if (refused.ok()) {
      ++live_requests_;
      inbox_.Add(std::move(request));
      changed_.NotifyAll();
    }
  }
  if (!refused.ok()) request->Refuse(refused);
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
    if (!info_.has_value()) return;  // every request has ended or is about to
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

void EngineLoop::Drain() {
  MutexLock lock(mu_);
  draining_ = true;
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
    absl::StatusOr<Formed> formed = Form();
    absl::Status why = formed.status();
    if (formed.ok()) {
      const TimePoint since = clock_.Now();
      why = Serve(*std::move(formed));
      // A group that is lost as soon as it is formed counts like one that cannot be formed.
      if (Between(since, clock_.Now()) > options_.longest_retry) retry = options_.first_retry;
    }
    group_.Disband();
    if (!PauseBeforeRetry(retry, why)) break;
    retry = std::min(2 * retry, options_.longest_retry);
  }
  KVASIR_CHECK(requests_.empty());
}

absl::StatusOr<EngineLoop::Formed> EngineLoop::Form() {
  Formed formed;
  KVASIR_ASSIGN_OR_RETURN(formed.info, group_.Form());
  if (options_.check_group) KVASIR_RETURN_IF_ERROR(options_.check_group(formed.info));
  const v1::SchedulerConfig& config = options_.scheduler;
  KVASIR_ASSIGN_OR_RETURN(
      formed.scheduler,
      Scheduler::Create({.group_epoch = formed.info.epoch,
                         .num_ranks = static_cast<int64_t>(formed.info.ranks.size()),
                         .device_blocks = formed.info.device_blocks,
                         .disk_blocks = formed.info.disk_blocks,
                         .attention_parity_tokens = formed.info.attention_parity_tokens,
                         .mass_unmeasured = formed.info.mass_unmeasured,
                         .vocab_size = formed.info.vocab_size,
                         .weights_hash = formed.info.weights_hash,
                         .kv_form = formed.info.kv_form,
                         .max_num_seqs = config.max_num_seqs(),
                         .max_num_batched_tokens = config.max_num_batched_tokens(),
                         .max_queue_len = config.max_queue_len(),
                         .max_queued_tokens = config.max_queued_tokens(),
                         .enable_prefix_caching = config.enable_prefix_caching()},
                        kvstore::PrefixIndex::Create(formed.info.host_blocks, kvstore::HashBlock,
                                                     options_.block_listener)));
  KVASIR_RETURN_IF_ERROR(UpdateTiers(*formed.scheduler));
  return formed;
}

// Serves until the group is lost or the loop stops; returns why.
absl::Status EngineLoop::Serve(Formed formed) {
  SetReady(formed.info);
  Scheduler& scheduler = *formed.scheduler;
  const absl::Status why = ServeUntilLost(scheduler);
  group_.Disband();
  {
    MutexLock lock(mu_);
    resting_ = true;
  }
  // Requests that come from here on are refused at once; those that came before end below.
  SetNotReady(formed.info, why);
  Dispatch(scheduler.FailAll(why, clock_.Now()), scheduler);
  FailQueued(why);
  PublishState(scheduler);
  return why;
}

// Returns false when the loop stops.
bool EngineLoop::PauseBeforeRetry(absl::Duration retry, const absl::Status& why) {
  MutexLock lock(mu_);
  if (stop_.has_value()) return false;
  // A reason is logged once: here, or by the server when it ends with it before it has served.
  const bool is_told = is_retrying_ && why == not_ready_because_;
  const bool is_last = IsPermanent(why) && !has_served_;
  if (!is_told && !is_last) spdlog::warn("no worker group, trying again: {}", why.ToString());
  not_ready_because_ = why;
  is_retrying_ = true;
  state_changed_.NotifyAll();
  const TimePoint until = After(clock_.Now(), retry);
  while (!stop_.has_value() && clock_.Now() < until) clock_.Wait(mu_, changed_, until);
  return !stop_.has_value();
}

// Steps until the group is lost or the loop must stop. Returns the status that requests end with.
absl::Status EngineLoop::ServeUntilLost(Scheduler& scheduler) {
  Wait wait = Wait::kForEvents;
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(Inbox::Contents arrived, AwaitArrivals(wait, scheduler));
    if (const absl::Status heard = UpdateTiers(scheduler); !heard.ok()) return ForClients(heard);
    Apply(std::move(arrived), scheduler);
    EndOverdue(scheduler);
    Scheduler::Planned planned = scheduler.NextPlan(clock_.Now());
    Dispatch(std::move(planned.events), scheduler);
    const bool is_sent = planned.plan.has_value();
    if (is_sent) KVASIR_RETURN_IF_ERROR(EndOf(group_.Send(*planned.plan)));
    wait = scheduler.unanswered_plans() > 0 ? Wait::kNo : Wait::kForEvents;
    const bool may_plan = is_sent && scheduler.unanswered_plans() < Scheduler::kMostPlans;
    if (may_plan || wait == Wait::kForEvents) continue;
    absl::StatusOr<v1::StepReply> reply = group_.AwaitReply();
    if (!reply.ok()) return EndOf(reply.status());
    {
      MutexLock lock(mu_);
      tiers_ = reply->tiers();
    }
    absl::StatusOr<std::vector<Event>> events = scheduler.OnReply(*reply, clock_.Now());
    if (!events.ok()) return ForClients(events.status());
    Dispatch(*std::move(events), scheduler);
  }
}

absl::Status EngineLoop::EndOf(const absl::Status& group) const {
  if (group.ok()) return group;
  MutexLock lock(mu_);
  return stop_.has_value() ? *stop_ : ForClients(group);
}

absl::StatusOr<Inbox::Contents> EngineLoop::AwaitArrivals(Wait wait, const Scheduler& scheduler) {
  const std::optional<TimePoint> deadline = scheduler.NextDeadline();
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
    if (deadline.has_value()) {
      clock_.Wait(mu_, changed_, *deadline);
    } else {
      changed_.Wait(mu_);
    }
  }
}

absl::Status EngineLoop::UpdateTiers(Scheduler& scheduler) {
  {
    MutexLock lock(mu_);
    if (!std::exchange(tier_reports_, false)) return absl::OkStatus();
  }
  const TimePoint now = clock_.Now();
  for (const RankTierReport& from : group_.TakeTierReports()) {
    KVASIR_RETURN_IF_ERROR(scheduler.OnTierReport(from.rank, from.report, now));
  }
  return absl::OkStatus();
}

// Cancels before it adds, so that cancelled requests make room for new ones.
void EngineLoop::Apply(Inbox::Contents arrived, Scheduler& scheduler) {
  for (const Inbox::Cancellation& cancellation : arrived.cancelled) {
    auto finish = scheduler.Cancel(cancellation.id, cancellation.why, clock_.Now());
    if (finish.has_value()) OnFinish(*std::move(finish));
  }
  for (std::unique_ptr<Request>& request : arrived.submitted) {
    const absl::Status added = scheduler.Add(request->TakeSpec());
    if (added.ok()) {
      const SequenceId id = request->sequence();
      requests_.emplace(id, std::move(request));
    } else {
      request->Refuse(added);
      RequestEnded();
    }
  }
}

// Called before every plan. While there are requests there are steps, so none is overdue for long.
void EngineLoop::EndOverdue(Scheduler& scheduler) {
  const TimePoint now = clock_.Now();
  const absl::Duration longest = absl::Seconds(options_.scheduler.max_request_time());
  std::vector<SequenceId> overdue;
  for (const auto& [id, request] : requests_) {
    if (Between(request->arrival(), now) > longest) overdue.push_back(id);
  }
  const absl::Status why = absl::DeadlineExceededError(
      absl::StrCat("the request is not done after ", absl::FormatDuration(longest),
                   ", this server's --max-request-time"));
  for (const SequenceId id : overdue) {
    if (auto finish = scheduler.Cancel(id, why, now)) OnFinish(*std::move(finish));
  }
}

void EngineLoop::Dispatch(std::vector<Event> events, Scheduler& scheduler) {
  PublishState(scheduler);  // before clients see the events
  const TimePoint now = clock_.Now();
  for (Event& event : events) {
    if (const auto* progress = std::get_if<ProgressEvent>(&event)) {
      requests_.at(progress->id)->OnProgress(*progress, now);
    } else if (auto* scores = std::get_if<PromptLogprobsEvent>(&event)) {
      requests_.at(scores->id)->OnPromptLogprobs(std::move(*scores));
    } else if (const auto* token = std::get_if<TokenEvent>(&event)) {
      if (requests_.at(token->id)->OnToken(*token, now) == Request::Verdict::kGoOn) continue;
      // When it was the last token anyway, the next event is its end.
      std::optional<FinishEvent> finish = scheduler.StopEarly(token->id, now);
      PublishState(scheduler);
      if (finish.has_value()) OnFinish(*std::move(finish));
    } else {
      OnFinish(std::get<FinishEvent>(std::move(event)));
    }
  }
}

void EngineLoop::OnFinish(FinishEvent event) {
  const auto it = requests_.find(event.id);
  it->second->Finish(event.status, std::move(event.summary), clock_.Now());
  requests_.erase(it);
  RequestEnded();
}

void EngineLoop::RequestEnded() {
  MutexLock lock(mu_);
  --live_requests_;
  state_changed_.NotifyAll();
}

void EngineLoop::PublishState(const Scheduler& scheduler) {
  const SchedulerStats stats = scheduler.stats();
  metrics_.SchedulerState(stats);
  MutexLock lock(mu_);
  if (stats.disk_set_aside && !scheduler_stats_.disk_set_aside) {
    spdlog::error(
        "the disk tier does not answer: it is set aside and tried again from time to time");
  } else if (!stats.disk_set_aside && scheduler_stats_.disk_set_aside) {
    spdlog::info("the disk tier answers again");
  }
  scheduler_stats_ = stats;
}

void EngineLoop::SetReady(const GroupInfo& info) {
  metrics_.GroupFormed({.num_device_blocks = info.device_blocks,
                        .num_host_blocks = info.host_blocks,
                        .num_disk_blocks = info.disk_blocks,
                        .kv_cache_dtype = info.kv_form.substr(info.kv_form.find('/') + 1),
                        .tensor_parallel_size = static_cast<int64_t>(info.addresses.size())});
  for (size_t i = 0; i < info.addresses.size(); ++i) {
    metrics_.WorkerUp(static_cast<int64_t>(i), true);
  }
  spdlog::info("serving: epoch {}, {} workers, context of {} tokens", info.epoch,
               info.addresses.size(), info.max_model_len);
  const auto tokens = [](int64_t blocks) { return blocks * kvstore::kBlockTokens; };
  spdlog::info("KV fits {} tokens: device {}, host {}, disk {}", tokens(info.host_blocks),
               tokens(info.device_blocks), tokens(info.host_blocks), tokens(info.disk_blocks));
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

void EngineLoop::SetNotReady(const GroupInfo& info, const absl::Status& why) {
  {
    MutexLock lock(mu_);
    info_.reset();
    is_announced_ = false;
    not_ready_because_ = why;
    if (!stop_.has_value()) metrics_.GroupLost();
  }
  for (size_t i = 0; i < info.addresses.size(); ++i) {
    metrics_.WorkerUp(static_cast<int64_t>(i), false);
  }
  if (options_.on_readiness) options_.on_readiness(false);
}

// Refuses requests that were submitted but not yet seen by a scheduler.
void EngineLoop::FailQueued(const absl::Status& why) {
  Inbox::Contents arrived;
  {
    MutexLock lock(mu_);
    arrived = inbox_.TakeAll();
  }
  for (std::unique_ptr<Request>& request : arrived.submitted) {
    request->Refuse(why);
    RequestEnded();
  }
}

}  // namespace kvasir::coordinator
