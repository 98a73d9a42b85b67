#include "coordinator/request/running_requests.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

void SetDuration(absl::Duration from, google::protobuf::Duration& to) {
  const int64_t nanos = absl::ToInt64Nanoseconds(std::max(from, absl::ZeroDuration()));
  to.set_seconds(nanos / 1'000'000'000);
  to.set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

double PerSecond(int64_t tokens, absl::Duration time) {
  const double seconds = absl::ToDoubleSeconds(time);
  return tokens > 0 && seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

float Mean(double sum, uint64_t samples) {
  return static_cast<float>(sum / static_cast<double>(samples));
}

void DescribeReading(const RunningRequest& request, TimePoint now, v1::RequestInfo& info) {
  info.set_state(v1::REQUEST_STATE_READING);
  info.set_tokens_per_second(PerSecond(request.processed_tokens - request.cached_tokens,
                                       Between(*request.admitted_at, now)));
  if (!request.eta.has_value()) return;
  SetDuration(*request.eta - Between(request.progress_at, now), *info.mutable_eta());
}

void DescribeAnswering(const RunningRequest& request, TimePoint now, v1::RequestInfo& info) {
  info.set_state(v1::REQUEST_STATE_ANSWERING);
  const double rate = PerSecond(request.answer_tokens - 1, Between(*request.first_token_at, now));
  info.set_tokens_per_second(rate);
  if (rate == 0) return;
  const auto left = static_cast<double>(request.max_tokens - request.answer_tokens);
  SetDuration(absl::Seconds(left / rate), *info.mutable_eta());
}

void DescribeAttention(const AttentionSoFar& attention, v1::RequestInfo& info) {
  info.set_blocks_total(attention.blocks_total);
  info.set_blocks_skipped(attention.blocks_skipped);
  if (attention.measured_samples > 0) {
    info.set_measured_mass(Mean(attention.measured_mass, attention.measured_samples));
  }
  if (attention.estimated_samples > 0) {
    info.set_estimated_mass(Mean(attention.estimated_mass, attention.estimated_samples));
  }
}

v1::RequestInfo Describe(const RunningRequest& request, TimePoint now) {
  v1::RequestInfo info;
  info.set_request_id(request.id);
  info.set_policy(request.policy);
  SetDuration(Between(request.arrived, now), *info.mutable_age());
  info.set_prompt_tokens(static_cast<uint32_t>(request.prompt_tokens));
  info.set_processed_tokens(static_cast<uint32_t>(request.processed_tokens));
  info.set_cached_tokens(static_cast<uint32_t>(request.cached_tokens));
  info.set_answer_tokens(static_cast<uint32_t>(request.answer_tokens));
  info.set_max_tokens(static_cast<uint32_t>(request.max_tokens));
  if (request.resumes) {
    info.set_state(v1::REQUEST_STATE_RESUMING);
  } else if (request.first_token_at.has_value()) {
    DescribeAnswering(request, now, info);
  } else if (request.admitted_at.has_value()) {
    DescribeReading(request, now, info);
  } else {
    info.set_state(v1::REQUEST_STATE_WAITING);
  }
  DescribeAttention(request.attention, info);
  return info;
}

}  // namespace

void RunningRequests::Lease::OnProgress(const ProgressEvent& event, TimePoint now) {
  MutexLock lock(requests_.mu_);
  RunningRequest& request = requests_.requests_.at(number_);
  if (!request.admitted_at.has_value()) request.admitted_at = now;
  request.progress_at = now;
  request.resumes = false;
  request.processed_tokens = event.processed_tokens;
  request.cached_tokens = event.cached_tokens;
  request.eta = event.eta;
  request.attention = event.attention;
}

void RunningRequests::Lease::OnToken(const TokenEvent& event, TimePoint now) {
  MutexLock lock(requests_.mu_);
  RunningRequest& request = requests_.requests_.at(number_);
  if (!request.first_token_at.has_value()) request.first_token_at = now;
  request.answer_tokens = event.index + 1;
  request.resumes = false;
  request.attention = event.attention;
}

void RunningRequests::Lease::OnGroupLost() {
  MutexLock lock(requests_.mu_);
  requests_.requests_.at(number_).resumes = true;
}

void RunningRequests::Lease::OnSelections(v1::SelectionMap map, TimePoint now) {
  auto observed = std::make_shared<const ObservedSelections>(
      ObservedSelections{.at = now, .map = std::move(map)});
  MutexLock lock(requests_.mu_);
  requests_.requests_.at(number_).selections = std::move(observed);
}

absl::StatusOr<RunningRequest> RunningRequests::Find(const std::string& id) const {
  MutexLock lock(mu_);
  for (const auto& [number, request] : requests_) {
    if (request.id == id) return request;
  }
  return absl::NotFoundError("no request of this id runs; it may have ended");
}

absl::StatusOr<std::unique_ptr<RunningRequests::Lease>> RunningRequests::Acquire(
    RunningRequest request) {
  MutexLock lock(mu_);
  if (!ids_.insert(request.id).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("request_id '", request.id, "' is running; use another one or none"));
  }
  const int64_t number = next_++;
  requests_.emplace(number, std::move(request));
  return std::make_unique<Lease>(*this, number);
}

std::vector<v1::RequestInfo> RunningRequests::List(size_t most, TimePoint now) const {
  std::vector<RunningRequest> oldest;
  {
    MutexLock lock(mu_);
    for (const auto& [number, request] : requests_) {
      if (oldest.size() >= most) break;
      oldest.push_back(request);
    }
  }
  std::vector<v1::RequestInfo> described;
  for (const RunningRequest& request : oldest) described.push_back(Describe(request, now));
  return described;
}

void RunningRequests::Release(int64_t number) {
  MutexLock lock(mu_);
  const auto it = requests_.find(number);
  ids_.erase(it->second.id);
  requests_.erase(it);
}

}  // namespace kvasir::coordinator
