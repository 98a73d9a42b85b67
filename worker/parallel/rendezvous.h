// The exchange of small entries by which the ranks of a group find each other before they can
// communicate: entries of this rank are published (over the coordinator's stream), and the reader
// of that stream delivers those of the others. It hides the locking. Called by the service
// (Deliver, Fail) and by collectives while they connect (Put, Wait). Thread-safe.
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

  // `publish` hands an entry to the other ranks. It is called without locks held.
  explicit Rendezvous(Publish publish) : publish_(std::move(publish)) {}

  // Publishes this rank's entry; it is visible to Wait here as well.
  void Put(const std::string& key, const std::string& value) EXCLUDES(mu_);
  // Takes an entry of another rank. The first value of a key is kept.
  void Deliver(const std::string& key, const std::string& value) EXCLUDES(mu_);
  // Gives up on the group: every Wait, current and later, returns `status`.
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
