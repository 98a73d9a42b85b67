#include "coordinator/security/caller.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr absl::Duration kRetry = absl::Seconds(1);

std::string Gigabytes(int64_t bytes) {
  return absl::StrFormat("%.4g GB", 1e-9 * static_cast<double>(bytes));
}

}  // namespace

Caller::Use::~Use() {
  MutexLock lock(caller_->in_use_->mu);
  --caller_->in_use_->requests;
  caller_->in_use_->kv_bytes -= kv_bytes_;
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
    const std::shared_ptr<const Caller>& caller, const CallerNeeds& needs, TimePoint now) {
  KVASIR_RETURN_IF_ERROR(caller->Take(needs, now));
  return std::make_unique<Use>(caller, needs.kv_bytes);
}

absl::Status Caller::CheckKv(const CallerNeeds& needs) const {
  if (limits_.kv_bytes == 0) return absl::OkStatus();
  const std::string asked =
      absl::StrFormat("this request may reach %s (%d tokens of prompt, %d of answer)",
                      Gigabytes(needs.kv_bytes), needs.prompt_tokens, needs.max_tokens);
  if (needs.kv_bytes > limits_.kv_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the API key ", name_, " may hold ", Gigabytes(limits_.kv_bytes),
                     " of KV and ", asked, "; shorten the prompt or lower max_tokens"));
  }
  const int64_t left = limits_.kv_bytes - in_use_->kv_bytes;
  if (needs.kv_bytes <= left) return absl::OkStatus();
  return proto::WithRetryDelay(
      absl::ResourceExhaustedError(absl::StrCat(
          "the API key ", name_, " may hold ", Gigabytes(limits_.kv_bytes), " of KV, of which ",
          Gigabytes(std::max<int64_t>(left, 0)), " are free beside its ", in_use_->requests,
          " running requests, and ", asked, "; lower max_tokens, or wait for one to end")),
      kRetry);
}

absl::Status Caller::Take(const CallerNeeds& needs, TimePoint now) const {
  MutexLock lock(in_use_->mu);
  if (limits_.concurrent_requests > 0 && in_use_->requests >= limits_.concurrent_requests) {
    return proto::WithRetryDelay(absl::ResourceExhaustedError(absl::StrCat(
                                     "the API key ", name_, " has ", in_use_->requests,
                                     " running requests, as many as it may; wait for one to end")),
                                 kRetry);
  }
  KVASIR_RETURN_IF_ERROR(CheckKv(needs));
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
    in_use_->tokens_left -= static_cast<double>(needs.prompt_tokens);
  }
  ++in_use_->requests;
  in_use_->kv_bytes += needs.kv_bytes;
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
