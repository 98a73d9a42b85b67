// A worker's metrics for /metrics. It hides prometheus-cpp's families and turns totals into
// increments. Counters belong to the process: they go on when a group is formed again. The engine
// thread records; any thread may read the registry.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "prometheus/registry.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {

struct GroupLabels {
  std::string model_name;  // as the coordinator calls it
  int64_t rank = 0;
  bool disk_tier = false;                  // whether a disk tier is configured
  std::vector<std::string> policies = {};  // names of the declared ones, by index
};

class WorkerMetrics {
 public:
  // `registry` outlives the metrics.
  explicit WorkerMetrics(prometheus::Registry& registry);
  ~WorkerMetrics();

  // From this call on series carry these labels, and the engine's totals start at 0.
  void JoinGroup(const GroupLabels& labels);
  // REQUIRES: JoinGroup.
  void RecordStep(const Engine& engine, const v1::StepPlan& plan, const v1::StepReply& reply);
  // Records what the tiers hold and have done; RecordStep calls it too. REQUIRES: JoinGroup.
  void RecordTiers(const Engine& engine);

 private:
  struct Families;
  struct Series;        // series of one group
  struct PolicySeries;  // of one of its policies

  void RecordFailures(const v1::StepPlan& plan, const v1::StepReply& reply);
  void RecordDisk(const Engine& engine, const kvstore::KvStoreStats& stats);
  void RecordPeers(const kvstore::PeerStats& peers);
  void RecordAttention(const AttentionMeter& meter);

  const std::unique_ptr<Families> families_;
  std::unique_ptr<Series> series_;
};

}  // namespace kvasir::worker
