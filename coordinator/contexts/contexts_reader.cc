// The thread of the contexts: it reads one after the other, ends pins whose time has passed, and
// writes records that changed.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/contexts/read_sink.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

// Pauses before a read that was refused is tried again: the first, each further one twice as long,
// the longest.
constexpr absl::Duration kFirstPause = absl::Seconds(1);
constexpr absl::Duration kLongestPause = absl::Seconds(60);

v1::GenerateRequest ReadRequestOf(const NamedContext& context) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Assign(context.tokens.begin(), context.tokens.end());
  *request.mutable_policy() = context.policy;
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(1);
  return request;
}

}  // namespace

void Contexts::RunReader() {
  for (;;) {
    Work work = AwaitWork();
    if (!work.stops) {
      for (const auto& [number, tier] : work.expired) engine_->Unpin(number, tier);
      if (work.ended.has_value()) TakeEnd(*work.ended);
      if (work.read.has_value()) Read(*work.read);
    }
    for (const v1::ContextRecord& record : work.unsaved) {
      MutexLock files(files_mu_);
      if (!Find(record.tenant(), record.name()).ok()) continue;  // forgotten meanwhile
      const absl::Status saved = Save(record);
      if (!saved.ok()) spdlog::warn("{}", std::string(saved.message()));
    }
    if (work.stops) return;
  }
}

Contexts::Work Contexts::AwaitWork() {
  MutexLock lock(mu_);
  for (;;) {
    Work work = {.stops = stopping_};
    TimePoint until = TakeDue(work);
    work.ended = std::exchange(ended_, std::nullopt);
    const bool waits = reading_ == nullptr && !to_read_.empty();
    if (waits && !work.ended.has_value()) {
      if (clock_.Now() >= next_try_) {
        const std::shared_ptr<const NamedContext> context = to_read_.front();
        to_read_.pop_front();
        reading_ = std::make_shared<ReadSink>(*this, context);
        work.read = *EntryOf(*context);
      }
      until = std::min(until, next_try_);
    }
    if (work.stops || work.ended.has_value() || work.read.has_value() || !work.expired.empty() ||
        !work.unsaved.empty()) {
      return work;
    }
    if (until == TimePoint::max()) {
      changed_.Wait(mu_);
    } else {
      clock_.Wait(mu_, changed_, until);
    }
  }
}

TimePoint Contexts::TakeDue(Work& work) {
  TimePoint next = TimePoint::max();
  const TimePoint now = clock_.Now();
  work.expired = std::exchange(to_unpin_, {});
  for (auto& [key, entry] : entries_) {
    for (auto pin = entry.pins.begin(); pin != entry.pins.end();) {
      if (pin->second.expires > now) {
        next = std::min(next, pin->second.expires);
        ++pin;
        continue;
      }
      work.expired.emplace_back(entry.context->number, pin->first);
      entry.is_unsaved = true;
      pin = entry.pins.erase(pin);
    }
    if (!std::exchange(entry.is_unsaved, false)) continue;
    work.unsaved.push_back(RecordOf(entry));
    for (auto& [tier, pin] : entry.pins) pin.recorded = pin.expires;
  }
  return next;
}

void Contexts::Read(const Entry& entry) {
  std::shared_ptr<ReadSink> sink;
  {
    MutexLock lock(mu_);
    sink = reading_;
  }
  const v1::GenerateRequest request = ReadRequestOf(*entry.context);
  engine_->Read(request,
                {.request_id = absl::StrCat("context-", entry.context->name, "-", ++reads_),
                 .caller = entry.caller,
                 .tenant = entry.context->tenant,
                 .arrived = clock_.Now()},
                sink);
}

void Contexts::OnProgress(const NamedContext& context, const v1::Progress& progress) {
  MutexLock lock(mu_);
  Entry* const entry = EntryOf(context);
  if (entry == nullptr) return;
  if (entry->state == v1::CONTEXT_STATE_EVICTED) return;
  entry->state = v1::CONTEXT_STATE_READING;
  entry->processed_tokens = progress.processed_tokens();
  entry->eta.reset();
  if (progress.has_eta()) entry->eta = progress.eta();
  CountStates();
}

void Contexts::OnEnd(Ended ended) {
  MutexLock lock(mu_);
  ended_ = std::move(ended);
  changed_.NotifyAll();
}

// A read that was refused before it began is tried again: there is no group, or no room just now.
// One that began and failed may be the cause.
void Contexts::TakeEnd(const Ended& ended) {
  const bool is_passing =
      absl::IsUnavailable(ended.status) || proto::RetryDelay(ended.status).has_value();
  {
    MutexLock lock(mu_);
    reading_ = nullptr;
    Entry* const entry = EntryOf(*ended.context);
    if (entry == nullptr || entry->state == v1::CONTEXT_STATE_EVICTED) return;
    entry->eta.reset();
    if (is_passing && !ended.began) {
      to_read_.push_front(ended.context);
      pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
      next_try_ = After(clock_.Now(), pause_);
    } else if (ended.status.ok()) {
      entry->state = v1::CONTEXT_STATE_READY;
      entry->is_unsaved = true;
      pause_ = absl::ZeroDuration();
    } else {
      entry->state = v1::CONTEXT_STATE_FAILED;
      entry->reason = std::string(ended.status.message());
    }
    CountStates();
  }
  if (ended.status.ok()) PinAgain(ended.context);
}

void Contexts::ReadSoon(Entry& entry) {
  const bool is_read = reading_ != nullptr && &reading_->context() == entry.context.get();
  if (is_read || std::find(to_read_.begin(), to_read_.end(), entry.context) != to_read_.end()) {
    return;
  }
  to_read_.push_back(entry.context);
  entry.state = v1::CONTEXT_STATE_WAITING;
  entry.processed_tokens = 0;
  entry.reason.clear();
  CountStates();
  changed_.NotifyAll();
}

}  // namespace kvasir::coordinator
