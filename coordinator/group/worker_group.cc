#include "coordinator/group/worker_group.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "spdlog/spdlog.h"

#include "coordinator/group/step_replies.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/worker_protocol.h"

namespace kvasir::coordinator {
namespace {

using kernels::CondVar;
using kernels::Mutex;
using kernels::MutexLock;

// Returns HOST of HOST:PORT; "unix" for unix sockets, which are on this machine.
absl::string_view MachineOf(absl::string_view address) {
  return absl::StartsWith(address, "unix:") ? "unix" : address.substr(0, address.rfind(':'));
}

class WorkerGroupImpl final : public WorkerGroup {
 public:
  WorkerGroupImpl(WorkerGroupOptions options, WorkerDialer dialer, Clock& clock)
      : options_(std::move(options)), dialer_(std::move(dialer)), clock_(clock) {}
  ~WorkerGroupImpl() override { Disband(); }

  absl::StatusOr<GroupInfo> Form() override;
  absl::Status Send(const v1::StepPlan& plan) override EXCLUDES(mu_);
  absl::StatusOr<v1::StepReply> AwaitReply() override EXCLUDES(mu_);
  std::vector<RankTierReport> TakeTierReports() override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return std::exchange(tier_reports_, {});
  }
  void Disband() override EXCLUDES(mu_);
  void Interrupt() override EXCLUDES(mu_);
  void SetLossCallback(std::function<void(const absl::Status&)> on_loss) override {
    on_loss_ = std::move(on_loss);
  }
  void SetProgressCallback(std::function<void(const std::string&)> on_progress) override {
    on_progress_ = std::move(on_progress);
  }
  void SetTierReportCallback(std::function<void()> on_report) override {
    on_tier_report_ = std::move(on_report);
  }

 private:
  // The stream of one rank in one formation.
  struct Rank final : WorkerClient::Listener {
    Rank(WorkerGroupImpl& g, size_t i) : group(g), index(i) {}
    void OnMessage(v1::WorkerMessage message) override {
      group.OnMessage(index, std::move(message));
    }
    void OnClosed(const absl::Status& status) override { group.OnClosed(index, status); }

    WorkerGroupImpl& group;
    const size_t index;
    std::unique_ptr<WorkerClient> client;
    std::deque<v1::StepReply> replies;  // not yet taken; used by the engine loop's thread
  };
  struct Received {
    size_t rank = 0;
    v1::WorkerMessage message;
  };

  void OnMessage(size_t rank, v1::WorkerMessage message) EXCLUDES(mu_);
  void OnClosed(size_t rank, const absl::Status& status) EXCLUDES(mu_);

  std::string Name(size_t rank) const {
    return absl::StrCat("worker ", rank, " (", options_.addresses[rank], ")");
  }
  // Returns the number of ranks on the machine of `address`, including its own.
  uint32_t RanksBeside(const std::string& address) const;
  void Dial();
  // Returns the next message of any rank. The reason when the group is gone; DEADLINE_EXCEEDED.
  absl::StatusOr<Received> Receive(TimePoint deadline) EXCLUDES(mu_);
  absl::Status Handshake(std::vector<std::optional<v1::Ready>>& ready);
  // Returns one message of the handshake and marks its rank as answered. NOT_FOUND or UNAVAILABLE,
  // naming the silent ranks, when none comes in time.
  absl::StatusOr<Received> ReceiveInHandshake(std::vector<bool>& answered, TimePoint answer_by,
                                              const std::vector<std::optional<v1::Ready>>& ready);
  void ReportProgress(const std::string& what) const {
    if (on_progress_) on_progress_(what);
  }
  void Relay(size_t from, const v1::RendezvousEntry& entry);
  absl::StatusOr<GroupInfo> Agree(const std::vector<std::optional<v1::Ready>>& ready) const;
  absl::StatusOr<std::vector<v1::StepReply>> Gather();
  // Returns the names of the ranks that are not done.
  std::string Missing(const std::function<bool(size_t rank)>& is_done) const;
  absl::Status Fail(const absl::Status& status);

  const WorkerGroupOptions options_;
  const WorkerDialer dialer_;
  Clock& clock_;
  // Constant while streams are open.
  std::function<void(const absl::Status&)> on_loss_;
  std::function<void()> on_tier_report_;
  std::function<void(const std::string&)> on_progress_;

  // Used by the engine loop's thread.
  uint64_t epoch_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  size_t unanswered_ = 0;  // number of plans

  Mutex mu_;
  CondVar changed_;
  std::deque<Received> inbox_ GUARDED_BY(mu_);
  std::vector<RankTierReport> tier_reports_ GUARDED_BY(mu_);
  absl::Status lost_ GUARDED_BY(mu_);  // why the group is gone; OK while it exists
  bool between_steps_ GUARDED_BY(mu_) = false;
  bool interrupted_ GUARDED_BY(mu_) = false;
};

void WorkerGroupImpl::OnMessage(size_t rank, v1::WorkerMessage message) {
  if (message.has_tier_report()) {
    {
      MutexLock lock(mu_);
      tier_reports_.push_back({.rank = static_cast<int64_t>(rank),
                               .report = std::move(*message.mutable_tier_report())});
    }
    if (on_tier_report_) on_tier_report_();
    return;
  }
  MutexLock lock(mu_);
  inbox_.push_back({.rank = rank, .message = std::move(message)});
  changed_.NotifyAll();
}

void WorkerGroupImpl::OnClosed(size_t rank, const absl::Status& status) {
  bool tell = false;
  absl::Status lost;
  {
    MutexLock lock(mu_);
    if (!lost_.ok()) return;  // the other streams end after the first
    // DEADLINE_EXCEEDED is for our own waits only.
    const absl::StatusCode code =
        absl::IsDeadlineExceeded(status) ? absl::StatusCode::kUnavailable : status.code();
    lost_ = absl::Status(code, absl::StrCat(Name(rank), ": ", status.message()));
    lost = lost_;
    tell = std::exchange(between_steps_, false);
    changed_.NotifyAll();
  }
  if (tell && on_loss_) on_loss_(lost);
}

absl::StatusOr<WorkerGroupImpl::Received> WorkerGroupImpl::Receive(TimePoint deadline) {
  MutexLock lock(mu_);
  for (;;) {
    if (interrupted_) return absl::CancelledError("interrupted");
    if (!inbox_.empty()) {
      Received received = std::move(inbox_.front());
      inbox_.pop_front();
      return received;
    }
    if (!lost_.ok()) return lost_;
    if (clock_.Now() >= deadline) return absl::DeadlineExceededError("no message in time");
    clock_.Wait(mu_, changed_, deadline);
  }
}

void WorkerGroupImpl::Interrupt() {
  MutexLock lock(mu_);
  interrupted_ = true;
  changed_.NotifyAll();
}

void WorkerGroupImpl::Disband() {
  {
    MutexLock lock(mu_);
    between_steps_ = false;
    if (lost_.ok()) lost_ = absl::UnavailableError("the group was ended");
  }
  ranks_.clear();  // without mu_: waits for calls of OnMessage and OnClosed
}

absl::Status WorkerGroupImpl::Fail(const absl::Status& status) {
  Disband();
  return status;
}

// --- forming ------------------------------------------------------------------------------------

absl::StatusOr<GroupInfo> WorkerGroupImpl::Form() {
  Disband();
  {
    MutexLock lock(mu_);
    inbox_.clear();
    tier_reports_.clear();
    lost_ = absl::OkStatus();
  }
  ++epoch_;
  unanswered_ = 0;
  Dial();
  std::vector<std::optional<v1::Ready>> ready(ranks_.size());
  if (const absl::Status status = Handshake(ready); !status.ok()) return Fail(status);
  absl::StatusOr<GroupInfo> info = Agree(ready);
  if (!info.ok()) return Fail(info.status());
  MutexLock lock(mu_);
  if (!lost_.ok()) return lost_;
  between_steps_ = true;
  return info;
}

uint32_t WorkerGroupImpl::RanksBeside(const std::string& address) const {
  const auto& all = options_.addresses;
  return static_cast<uint32_t>(std::count_if(all.begin(), all.end(), [&](const std::string& other) {
    return MachineOf(other) == MachineOf(address);
  }));
}

void WorkerGroupImpl::Dial() {
  for (size_t i = 0; i < options_.addresses.size(); ++i) {
    ranks_.push_back(std::make_unique<Rank>(*this, i));
    Rank& rank = *ranks_.back();
    rank.client = dialer_(options_.addresses[i], rank);
    v1::CoordinatorMessage message;
    v1::ShardPlan& plan = *message.mutable_shard_plan();
    plan = options_.shard_plan;
    plan.set_protocol_version(proto::kWorkerProtocolVersion);
    plan.set_group_epoch(epoch_);
    plan.set_tensor_parallel_rank(static_cast<uint32_t>(i));
    plan.set_tensor_parallel_size(static_cast<uint32_t>(options_.addresses.size()));
    plan.set_ranks_on_machine(RanksBeside(options_.addresses[i]));
    if (!options_.peers.empty())
      plan.mutable_peers()->Assign(options_.peers[i].begin(), options_.peers[i].end());
    rank.client->Send(std::move(message));
  }
}

absl::StatusOr<WorkerGroupImpl::Received> WorkerGroupImpl::ReceiveInHandshake(
    std::vector<bool>& answered, TimePoint answer_by,
    const std::vector<std::optional<v1::Ready>>& ready) {
  const bool all_answered = std::all_of(answered.begin(), answered.end(), std::identity());
  const TimePoint silent_by = After(clock_.Now(), options_.form_silence);
  absl::StatusOr<Received> received =
      Receive(all_answered ? silent_by : std::min(answer_by, silent_by));
  if (received.ok()) answered[received->rank] = true;
  if (!absl::IsDeadlineExceeded(received.status())) return received;
  if (!all_answered) {
    return absl::NotFoundError(
        absl::StrCat("no answer within ", absl::FormatDuration(options_.answer_timeout), " from ",
                     Missing([&](size_t rank) { return answered[rank]; }),
                     "; see that it runs and that --workers names it, or raise --startup-timeout"));
  }
  return absl::UnavailableError(absl::StrCat(
      "silent for ", absl::FormatDuration(options_.form_silence), " while the group forms: ",
      Missing([&](size_t rank) { return ready[rank].has_value(); }), "; see the workers' logs"));
}

absl::Status WorkerGroupImpl::Handshake(std::vector<std::optional<v1::Ready>>& ready) {
  const TimePoint answer_by = After(clock_.Now(), options_.answer_timeout);
  std::vector<bool> answered(ranks_.size());
  while (std::any_of(ready.begin(), ready.end(), [](const auto& r) { return !r.has_value(); })) {
    const std::string silent = Missing([&](size_t rank) { return answered[rank]; });
    if (!silent.empty()) ReportProgress(absl::StrCat("no answer yet from ", silent));
    absl::StatusOr<Received> received = ReceiveInHandshake(answered, answer_by, ready);
    KVASIR_RETURN_IF_ERROR(received.status());
    const v1::WorkerMessage& message = received->message;
    switch (message.message_case()) {
      case v1::WorkerMessage::kLoadProgress:
        ReportProgress(absl::StrFormat("%s: %s, %.0f %%", Name(received->rank),
                                       message.load_progress().stage(),
                                       100 * message.load_progress().fraction()));
        break;
      case v1::WorkerMessage::kRendezvous:
        Relay(received->rank, message.rendezvous());
        break;
      case v1::WorkerMessage::kReady:
        ready[received->rank] = message.ready();
        spdlog::info("{} is ready: {}, {} blocks on the device, {} in host memory, {} on disk",
                     Name(received->rank), message.ready().device_name(),
                     message.ready().device_blocks(), message.ready().host_blocks(),
                     message.ready().disk_blocks());
        break;
      case v1::WorkerMessage::kTierReport:  // never here: OnMessage takes it
      case v1::WorkerMessage::kStepReply:
      case v1::WorkerMessage::kChallenge:  // WorkerClient takes these two
      case v1::WorkerMessage::kProof:
      case v1::WorkerMessage::MESSAGE_NOT_SET:
        return absl::InternalError(
            absl::StrCat(Name(received->rank), " sent something else than the handshake"));
    }
  }
  return absl::OkStatus();
}

void WorkerGroupImpl::Relay(size_t from, const v1::RendezvousEntry& entry) {
  for (const auto& rank : ranks_) {
    if (rank->index == from) continue;
    v1::CoordinatorMessage message;
    *message.mutable_rendezvous() = entry;
    rank->client->Send(std::move(message));
  }
}

absl::StatusOr<GroupInfo> WorkerGroupImpl::Agree(
    const std::vector<std::optional<v1::Ready>>& ready) const {
  GroupInfo info = {
      .epoch = epoch_,
      .weights_hash = ready[0]->weights_hash(),
      .kv_form = ready[0]->kv_form(),
      .device_blocks = static_cast<int64_t>(ready[0]->device_blocks()),
      .host_blocks = static_cast<int64_t>(ready[0]->host_blocks()),
      .disk_blocks = static_cast<int64_t>(ready[0]->disk_blocks()),
      .has_peers = !options_.peers.empty(),
      .attention_parity_tokens = static_cast<int64_t>(ready[0]->attention_parity_tokens()),
      .vocab_size = ready[0]->vocab_size(),
      .max_model_len = ready[0]->max_model_len(),
      .trained_window = ready[0]->trained_window(),
      .mass_unmeasured = ready[0]->mass_unmeasured(),
      .addresses = options_.addresses,
      .ranks = {}};
  for (size_t i = 0; i < ready.size(); ++i) {
    const v1::Ready& rank = *ready[i];
    if (rank.weights_hash() != info.weights_hash || rank.kv_form() != info.kv_form ||
        rank.vocab_size() != info.vocab_size || rank.max_model_len() != info.max_model_len) {
      return absl::FailedPreconditionError(
          absl::StrCat(Name(i), " does not fit ", Name(0), ": weights ",
                       absl::BytesToHexString(rank.weights_hash()).substr(0, 16), " and ",
                       absl::BytesToHexString(info.weights_hash).substr(0, 16), ", KV form ",
                       rank.kv_form(), " and ", info.kv_form, ", vocabulary ", rank.vocab_size(),
                       " and ", info.vocab_size, ", context ", rank.max_model_len(), " and ",
                       info.max_model_len, "; all workers must load the same model folder"));
    }
    info.device_blocks = std::min(info.device_blocks, static_cast<int64_t>(rank.device_blocks()));
    info.host_blocks = std::min(info.host_blocks, static_cast<int64_t>(rank.host_blocks()));
    info.disk_blocks = std::min(info.disk_blocks, static_cast<int64_t>(rank.disk_blocks()));
    info.ranks.push_back(rank);
  }
  if (info.weights_hash.empty() || info.vocab_size < 1 || info.max_model_len < 2) {
    return absl::InternalError(absl::StrCat(Name(0), " is ready without weights: vocabulary ",
                                            info.vocab_size, ", context ", info.max_model_len));
  }
  return info;
}

// --- stepping -----------------------------------------------------------------------------------

absl::Status WorkerGroupImpl::Send(const v1::StepPlan& plan) {
  {
    MutexLock lock(mu_);
    if (interrupted_) return absl::CancelledError("interrupted");
    if (!lost_.ok()) return lost_;
    between_steps_ = false;
  }
  ++unanswered_;
  for (const auto& rank : ranks_) {
    v1::CoordinatorMessage message;
    *message.mutable_step_plan() = plan;
    rank->client->Send(std::move(message));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::StepReply> WorkerGroupImpl::AwaitReply() {
  KVASIR_CHECK(unanswered_ > 0);
  absl::StatusOr<std::vector<v1::StepReply>> replies = Gather();
  if (!replies.ok()) return Fail(replies.status());
  absl::StatusOr<v1::StepReply> merged = MergeReplies(*std::move(replies));
  if (!merged.ok()) return Fail(merged.status());
  --unanswered_;
  MutexLock lock(mu_);
  // When the group was lost after the last reply, this step counts and the next one fails.
  if (lost_.ok()) between_steps_ = unanswered_ == 0;
  return merged;
}

// Returns the ranks' replies to the oldest plan. A rank may have answered the next plan already.
absl::StatusOr<std::vector<v1::StepReply>> WorkerGroupImpl::Gather() {
  TimePoint deadline = After(clock_.Now(), options_.step_timeout);
  const auto is_done = [this](size_t rank) { return !ranks_[rank]->replies.empty(); };
  const auto count = [this] {
    return std::count_if(ranks_.begin(), ranks_.end(),
                         [](const auto& rank) { return !rank->replies.empty(); });
  };
  for (;;) {
    const int64_t done = count();
    if (done == std::ssize(ranks_)) break;
    if (done > 0) deadline = std::min(deadline, After(clock_.Now(), options_.reply_spread));
    absl::StatusOr<Received> next = Receive(deadline);
    if (absl::IsDeadlineExceeded(next.status())) {
      return absl::UnavailableError(
          absl::StrCat("no answer to a step in time, taken for dead: ", Missing(is_done)));
    }
    KVASIR_RETURN_IF_ERROR(next.status());
    std::deque<v1::StepReply>& replies = ranks_[next->rank]->replies;
    if (!next->message.has_step_reply() || replies.size() == unanswered_) {
      return absl::InternalError(
          absl::StrCat(Name(next->rank), " sent something else than one answer to a step"));
    }
    replies.push_back(std::move(*next->message.mutable_step_reply()));
  }
  std::vector<v1::StepReply> all;
  for (const auto& rank : ranks_) {
    all.push_back(std::move(rank->replies.front()));
    rank->replies.pop_front();
  }
  return all;
}

std::string WorkerGroupImpl::Missing(const std::function<bool(size_t rank)>& is_done) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!is_done(i)) names.push_back(Name(i));
  }
  return absl::StrJoin(names, ", ");
}

}  // namespace

std::unique_ptr<WorkerGroup> CreateWorkerGroup(WorkerGroupOptions options, WorkerDialer dialer,
                                               Clock& clock) {
  return std::make_unique<WorkerGroupImpl>(std::move(options), std::move(dialer), clock);
}

}  // namespace kvasir::coordinator
