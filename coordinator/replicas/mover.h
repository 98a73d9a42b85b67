// The answers of a server that may go over to other replicas when it drains (--drain=move). It
// keeps count of them and moves all at once. Made by the server, called by the API. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/metrics/metrics.h"
#include "coordinator/replicas/movable_answer.h"
#include "coordinator/replicas/replica_servers.h"
#include "coordinator/request/client_sink.h"
#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

class Mover {
 public:
  // Null when running requests do not move. The references outlive the mover. INVALID_ARGUMENT for
  // servers that are none.
  static absl::StatusOr<std::unique_ptr<Mover>> Create(const v1::ServeConfig& config,
                                                       const v1::TlsClientConfig& tls, Clock& clock,
                                                       Metrics& metrics);
  ~Mover();  // Stop was called, or there are no answers

  // Returns the way of an answer to `client`, which may move once it has begun.
  std::shared_ptr<MovableAnswer> MakeAnswer(std::shared_ptr<ClientSink> client) EXCLUDES(mu_);

  // Moves all answers to the other servers, in turn.
  void MoveAll() EXCLUDES(mu_);
  // Number of answers that have not ended, here or there.
  int64_t num_answers() const EXCLUDES(mu_);
  // Waits until there are none. False at the deadline.
  bool WaitUntilNone(TimePoint deadline) EXCLUDES(mu_);
  // Ends answers that have moved, with `why`, and waits until there are none.
  void Stop(const absl::Status& why) EXCLUDES(mu_);

 private:
  Mover(std::unique_ptr<ReplicaServers> servers, Clock& clock, Metrics& metrics)
      : servers_(std::move(servers)), clock_(clock), metrics_(metrics) {}
  void OnMove(MovableAnswer::Outcome outcome);
  void Remove(int64_t id) EXCLUDES(mu_);

  const std::unique_ptr<const ReplicaServers> servers_;  // not empty
  Clock& clock_;
  Metrics& metrics_;

  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  int64_t next_ GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<int64_t, std::weak_ptr<MovableAnswer>> answers_ GUARDED_BY(mu_);
};

}  // namespace kvasir::coordinator
