// The coordinator's Prometheus metrics: requests, tokens, latencies, prefix cache, worker group.
// Names are vLLM's where the meaning is the same. Hidden: the registry's families and buckets.
// Made by the server, used by requests and the engine loop. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace kvasir::coordinator {

struct SchedulerStats;

// Sizes of a formed group, in blocks that every rank holds.
struct CacheConfigInfo {
  int64_t num_device_blocks = 0;
  int64_t num_host_blocks = 0;
  int64_t num_disk_blocks = 0;
  std::string kv_cache_dtype;
  int64_t tensor_parallel_size = 0;
};

// Number of contexts by state.
struct ContextCounts {
  int64_t waiting = 0;
  int64_t reading = 0;
  int64_t ready = 0;
  int64_t failed = 0;
  int64_t evicted = 0;
};

// Sums since the start.
struct MetricsTotals {
  uint64_t requests_finished = 0;
  uint64_t requests_rejected = 0;
  uint64_t prompt_tokens = 0;      // read, computed or cached
  uint64_t generation_tokens = 0;  // of finished requests, as all fields below
  uint64_t cached_device_tokens = 0;
  uint64_t cached_host_tokens = 0;
  uint64_t cached_disk_tokens = 0;
  uint64_t cached_peer_tokens = 0;
  uint64_t prefix_queries = 0;
  uint64_t prefix_hits = 0;
};

class Metrics {
 public:
  // `policies`: names of the declared policies, with which requests are counted.
  Metrics(const std::string& model_name, const std::vector<std::string>& policies);
  ~Metrics();

  prometheus::Registry& registry();

  // Counts by reason: the status code's name, in lower case.
  void RequestRejected(const absl::Status& status);
  // Counts prompt tokens whose KV has become ready, computed or cached.
  void PromptRead(int64_t tokens);
  // Whether some of the prompt was cached.
  enum class Cache { kMiss, kHit };
  void FirstToken(const std::string& policy, Cache cache, absl::Duration since_arrival);
  void NextToken(const std::string& policy, absl::Duration since_last);
  void RequestFinished(const absl::Status& status, const v1::Finish& summary,
                       absl::Duration since_arrival);

  // A request that should go over to another server when this one drains.
  enum class Move { kMoved, kStays, kLost };
  void RequestMoved(Move result);

  // Spans of traces: sent, and dropped.
  void SpansExported(int64_t count);
  enum class SpanDrop { kQueueFull, kExportFailed, kRejected };
  void SpansDropped(SpanDrop reason, int64_t count);

  MetricsTotals totals() const;

  void ContextStates(const ContextCounts& counts);
  // Counts what was overwritten on request.
  void Erased(const v1::Erased& erased);
  void SchedulerState(const SchedulerStats& stats);
  void GroupFormed(const CacheConfigInfo& info);
  void GroupLost();
  // Sets the series of one rank, which has the same labels as the rank's own series.
  void WorkerUp(int64_t rank, bool up);

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace kvasir::coordinator
