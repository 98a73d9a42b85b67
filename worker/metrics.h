// What a worker shows on /metrics. It hides prometheus-cpp's families and the turning of totals
// into increments. Counters are of the process: they go on when a group is formed anew. The engine
// thread records; the registry may be read by any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "prometheus/registry.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine.h"

namespace kvasir::worker {

struct GroupLabels {
  std::string model_name;  // as the coordinator calls it
  int64_t rank = 0;
  bool disk_tier = false;  // that there should be one
};

class WorkerMetrics {
 public:
  // `registry` outlives the metrics.
  explicit WorkerMetrics(prometheus::Registry& registry);
  ~WorkerMetrics();

  // From here on series carry these labels, and the engine's totals start at 0.
  void JoinGroup(const GroupLabels& labels);
  // REQUIRES: JoinGroup.
  void RecordStep(const Engine& engine, const v1::StepPlan& plan, const v1::StepReply& reply);
  // What the tiers hold and have done; part of RecordStep. REQUIRES: JoinGroup.
  void RecordTiers(const Engine& engine);

 private:
  struct Families;
  struct Series;  // of one group

  void RecordFailures(const v1::StepPlan& plan, const v1::StepReply& reply);
  void RecordDisk(const Engine& engine);
  void RecordAttention(const AttentionMeter& meter);
  void RecordContract(const ContractCounts& counts);

  const std::unique_ptr<Families> families_;
  std::unique_ptr<Series> series_;
};

}  // namespace kvasir::worker
