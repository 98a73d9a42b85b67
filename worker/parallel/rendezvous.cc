#include "worker/parallel/rendezvous.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

using kernels::MutexLock;

void Rendezvous::Put(const std::string& key, const std::string& value) {
  Deliver(key, value);
  publish_(key, value);
}

void Rendezvous::Deliver(const std::string& key, const std::string& value) {
  MutexLock lock(mu_);
  entries_.emplace(key, value);
  changed_.NotifyAll();
}

void Rendezvous::Fail(absl::Status status) {
  MutexLock lock(mu_);
  if (failed_.ok()) failed_ = std::move(status);
  changed_.NotifyAll();
}

absl::StatusOr<std::string> Rendezvous::Wait(const std::string& key, absl::Duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(timeout);
  MutexLock lock(mu_);
  for (;;) {
    if (!failed_.ok()) return failed_;
    if (const auto entry = entries_.find(key); entry != entries_.end()) return entry->second;
    if (!changed_.WaitUntil(mu_, deadline) && std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("no rendezvous entry '", key, "' within ", absl::FormatDuration(timeout)));
    }
  }
}

}  // namespace kvasir::worker
