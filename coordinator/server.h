// The coordinator as one object: tokenizer, policies, worker group, engine loop, gRPC server,
// health, reflection, HTTP and /metrics, built bottom up from a ServeConfig. Used by `kvasir serve`
// and by tests. Thread-safe, except that only one thread calls Shutdown.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/group/worker_group.h"
#include "coordinator/time/clock.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Makes the server's worker group from the plan for the ranks.
using WorkerGroupFactory =
    std::function<std::unique_ptr<WorkerGroup>(const v1::ShardPlan& shard_plan, Clock& clock)>;

class Server {
 public:
  // Listens on the configured ports and begins to form the group of the workers at `addresses`,
  // rank 0 first. Workers may come up later. INVALID_ARGUMENT for a configuration, a tokenizer or
  // policies that cannot be served, UNAVAILABLE for a port in use.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const v1::ServeConfig& config,
                                                       std::vector<std::string> addresses);
  // The same with a group made by the caller.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const v1::ServeConfig& config,
                                                       const WorkerGroupFactory& make_group);
  virtual ~Server() = default;  // calls Shutdown

  virtual int port() const = 0;
  virtual int http_port() const = 0;
  virtual int metrics_port() const = 0;
  // Returns "HOST:PORT" of every rank's /metrics; empty while no group serves.
  virtual std::vector<std::string> worker_metrics_addresses() const = 0;
  // Returns OK once requests are served. Errors that trying again will not mend are returned at
  // once, e.g. of a model that the workers cannot load or divide. Otherwise DEADLINE_EXCEEDED.
  virtual absl::Status WaitUntilReady(absl::Duration timeout) = 0;
  // Refuses new requests from now on; running ones may end, or with --drain=move go over to other
  // servers. The server is never ready again.
  virtual void Drain() = 0;
  // Returns false when requests still run here after `timeout`.
  virtual bool WaitUntilIdle(absl::Duration timeout) = 0;
  // Ends the worker group: the workers are free. Answers that come from other servers go on.
  // REQUIRES: Drain was called.
  virtual void EndGroup() = 0;
  // Number of answers that come from other servers since this one drains (--drain=move).
  virtual int64_t num_moved() const = 0;
  // Returns false when such answers still run after `timeout`.
  virtual bool WaitUntilMovedEnd(absl::Duration timeout) = 0;
  // Drains, ends running requests with UNAVAILABLE, and stops. Further calls do nothing.
  virtual void Shutdown() = 0;
};

}  // namespace kvasir::coordinator
