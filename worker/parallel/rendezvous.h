// The exchange of small entries by which the ranks of a group find each other before they can talk:
// what this rank puts is published (over the coordinator's stream), what the others put is
// delivered by whoever reads that stream. Hides the locking. Called by the service (Deliver, Fail)
// and by collectives while they connect (Put, Wait). Thread-safe.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace kvasir::worker {

class Rendezvous {
 public:
  using Publish = std::function<void(const std::string& key, const std::string& value)>;

  // `publish` hands an entry to the other ranks; called without locks held.
  explicit Rendezvous(Publish publish) : publish_(std::move(publish)) {}

  // Publishes this rank's entry; it is visible to Wait here as well.
  void Put(const std::string& key, const std::string& value) EXCLUDES(mu_);
  // An entry of another rank arrived. The first value of a key stays.
  void Deliver(const std::string& key, const std::string& value) EXCLUDES(mu_);
  // The group will not come together: every Wait, now and later, returns `status`.
  void Fail(absl::Status status) EXCLUDES(mu_);
  // Blocks until the entry is there. DEADLINE_EXCEEDED, naming the key, after `timeout`.
  absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) EXCLUDES(mu_);

 private:
  const Publish publish_;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::map<std::string, std::string> entries_ GUARDED_BY(mu_);
  absl::Status failed_ GUARDED_BY(mu_);
};

}  // namespace kvasir::worker
