#include "coordinator/security/caller.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr absl::Duration kRetry = absl::Seconds(1);

}  // namespace

Caller::Use::~Use() {
  MutexLock lock(caller_->in_use_->mu);
  --caller_->in_use_->requests;
}

void Caller::Use::AddTokens(int64_t count) {
  if (caller_->limits_.tokens_per_minute == 0) return;
  MutexLock lock(caller_->in_use_->mu);
  caller_->in_use_->tokens_left -= static_cast<double>(count);
}

Caller::Caller(std::string name, std::string tenant, CallerLimits limits, const Caller* before)
    : name_(std::move(name)),
      tenant_(std::move(tenant)),
      limits_(limits),
      in_use_(before != nullptr ? before->in_use_ : std::make_shared<InUse>()) {
  if (before != nullptr) return;
  MutexLock lock(in_use_->mu);
  in_use_->tokens_left = static_cast<double>(limits_.tokens_per_minute);
}

// Tenants of callers have no colon, so that no two pairs make the same text.
std::string Caller::Tenant(const std::string& part) const {
  return part.empty() ? tenant_ : absl::StrCat(tenant_, ":", part);
}

absl::StatusOr<std::unique_ptr<Caller::Use>> Caller::Begin(
    const std::shared_ptr<const Caller>& caller, int64_t prompt_tokens, TimePoint now) {
  KVASIR_RETURN_IF_ERROR(caller->Take(prompt_tokens, now));
  return std::make_unique<Use>(caller);
}

absl::Status Caller::Take(int64_t prompt_tokens, TimePoint now) const {
  MutexLock lock(in_use_->mu);
  if (limits_.concurrent_requests > 0 && in_use_->requests >= limits_.concurrent_requests) {
    return proto::WithRetryDelay(absl::ResourceExhaustedError(absl::StrCat(
                                     "the API key ", name_, " has ", in_use_->requests,
                                     " running requests, as many as it may; wait for one to end")),
                                 kRetry);
  }
  if (limits_.tokens_per_minute > 0) {
    const auto most = static_cast<double>(limits_.tokens_per_minute);
    const double minutes = absl::FDivDuration(Between(in_use_->filled, now), absl::Minutes(1));
    in_use_->tokens_left = std::min(most, in_use_->tokens_left + minutes * most);
    in_use_->filled = now;
    if (in_use_->tokens_left <= 0) {
      return proto::WithRetryDelay(absl::ResourceExhaustedError(absl::StrCat(
                                       "the API key ", name_, " has used its ",
                                       limits_.tokens_per_minute, " tokens a minute; wait")),
                                   kRetry + absl::Minutes(1) * (-in_use_->tokens_left / most));
    }
    in_use_->tokens_left -= static_cast<double>(prompt_tokens);
  }
  ++in_use_->requests;
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
