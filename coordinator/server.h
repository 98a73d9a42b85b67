// The coordinator as one object: tokenizer, policies, worker group, engine loop, gRPC server,
// health, reflection and /metrics, built bottom up from a ServeConfig. Used by `kvasir serve` and
// by tests. Thread-safe but for Shutdown, which one thread calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/clock.h"
#include "coordinator/worker_group.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// How a server makes its worker group from the plan for the ranks.
using WorkerGroupFactory =
    std::function<std::unique_ptr<WorkerGroup>(const v1::ShardPlan& shard_plan, Clock& clock)>;

class Server {
 public:
  // Listens on the configured ports and begins to form the group of the workers at `addresses`,
  // rank 0 first; workers may come up later. INVALID_ARGUMENT for a configuration, a tokenizer or
  // policies that cannot be served, UNAVAILABLE for a port in use.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const v1::ServeConfig& config,
                                                       std::vector<std::string> addresses);
  // The same with a group of the caller's making.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const v1::ServeConfig& config,
                                                       const WorkerGroupFactory& make_group);
  virtual ~Server() = default;  // Shutdown

  virtual int port() const = 0;
  virtual int metrics_port() const = 0;
  // "HOST:PORT" of every rank's /metrics; empty while no group serves.
  virtual std::vector<std::string> worker_metrics_addresses() const = 0;
  // OK once requests are served. What trying again will not mend comes at once: a model that the
  // workers cannot load or divide; else DEADLINE_EXCEEDED.
  virtual absl::Status WaitUntilReady(absl::Duration timeout) = 0;
  // Refuses new requests from here on; those that run may end. Readiness is gone for good.
  virtual void Drain() = 0;
  // False when requests still run after `timeout`.
  virtual bool WaitUntilIdle(absl::Duration timeout) = 0;
  // Drains, ends what still runs with UNAVAILABLE, and stops. What follows the first call does
  // nothing.
  virtual void Shutdown() = 0;
};

}  // namespace kvasir::coordinator
