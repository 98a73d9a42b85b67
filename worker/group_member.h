// One worker's part in tensor-parallel groups, one after another. For each it goes from the
// stream's ShardPlan through loading, meeting the other ranks and Ready to its plans, until the
// stream ends. It hides the order of the handshake and keeps the weights between groups of the same
// model. It sees the coordinator as a CoordinatorStream, so tests need no gRPC. Thread-compatible:
// used by the engine thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kvstore/host/host_memory.h"
#include "proto/security/group_secret.h"
#include "worker/backend/backend.h"
#include "worker/coordinator_stream.h"
#include "worker/engine/engine.h"
#include "worker/loaded_model.h"
#include "worker/metrics.h"
#include "worker/parallel/collective.h"
#include "worker/start_times.h"

namespace kvasir::worker {

struct GroupMemberOptions {
  std::string collective_host = "127.0.0.1";
  std::string peer_listen = {};            // as in WorkerConfig; empty: no peers
  std::string peer_transports = "sm,tcp";  // as in WorkerConfig
  std::shared_ptr<const proto::GroupSecret> peer_secret = {};       // set with peer_listen
  std::string metrics_address;                                      // for Ready
  StartTimes process_times = StartTimes(StartTimes::Clock::now());  // so far
  // Memory of the host tier, which outlives groups; null: each group has its own.
  kvstore::HostMemory* memory = nullptr;
  // Called when a coordinator gives this worker its rank.
  std::function<void(int64_t rank)> on_rank = [](int64_t) {};
  // Called when this worker becomes able to carry out plans, and when it no longer is.
  std::function<void(bool ready)> on_ready;
};

class GroupMember {
 public:
  // The references outlive the member.
  GroupMember(GroupMemberOptions options, Backend& backend, WorkerMetrics& metrics);

  // Serves one stream. OK when the coordinator ended it, otherwise the reason why the group ended.
  absl::Status Serve(CoordinatorStream& stream);

 private:
  // Reports the current stage and the fraction of it that is done.
  using Progress = std::function<void(absl::string_view stage, double fraction)>;

  absl::Status Load(const v1::ShardPlan& plan, const Progress& progress);
  absl::StatusOr<std::unique_ptr<Collective>> Connect(const v1::ShardPlan& plan,
                                                      CoordinatorStream& stream);
  absl::StatusOr<std::unique_ptr<kvstore::Tier>> MakeTier(const v1::ShardPlan& plan,
                                                          const kvstore::KvShard& shard) const;
  absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const v1::ShardPlan& plan,
                                                     Collective& collective,
                                                     const Progress& progress);
  v1::WorkerMessage MakeReady(const v1::ShardPlan& plan, const Engine& engine) const;
  // Begins a plan when it arrives, also while the one before is in flight, if the engine may.
  absl::Status RunPlans(Engine& engine, CoordinatorStream& stream);
  absl::Status Answer(const v1::StepPlan& plan, Engine& engine, CoordinatorStream& stream);
  void ReportTier(Engine& engine, CoordinatorStream& stream);

  const GroupMemberOptions options_;
  Backend& backend_;
  WorkerMetrics& metrics_;
  std::optional<StartTimes> process_times_;  // until the first stream begins
  std::optional<LoadedModel> model_;
  std::string model_key_;  // the ShardPlan fields that model_ was loaded for
};

}  // namespace kvasir::worker
