// A worker group that has formed, with the scheduler that will plan its steps. Used by the engine
// loop.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/group/worker_group.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/scheduling/scheduler.h"
#include "kvstore/index/block_listener.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

struct FormedGroup {
  GroupInfo info;
  std::unique_ptr<Scheduler> scheduler;
};

struct FormingOptions {
  const v1::SchedulerConfig& scheduler;
  // Checks that the group can serve the server's configuration; may be empty.
  const std::function<absl::Status(const GroupInfo&)>& check_group;
  kvstore::BlockListener* block_listener = nullptr;  // may be null
};

// Forms the group, as WorkerGroup::Form. Blocks.
absl::StatusOr<FormedGroup> FormGroup(WorkerGroup& group, const FormingOptions& options);

// True for an error that forming the group again will not mend.
bool IsPermanent(const absl::Status& status);

// Returns why there is no group as clients are told: one of two codes, without details.
absl::Status ForClients(const absl::Status& lost);

// Tells in the log when the disk or the peers are set aside, or answer again.
void LogSetAside(const SchedulerStats& before, const SchedulerStats& now);
// Tells the metrics and the log of a group that serves from now on.
void Announce(const GroupInfo& info, Metrics& metrics);

}  // namespace kvasir::coordinator
