// What the coordinator tells Prometheus: requests, tokens, latencies, prefix cache, worker group.
// Names follow vLLM's where the meaning is the same. Hidden: the registry's families and buckets.
// Made by the server, used by requests and the engine loop. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace kvasir::coordinator {

struct SchedulerStats;

// What is known of the group once it is formed.
struct CacheConfigInfo {
  int64_t num_device_blocks = 0;
  int64_t num_host_blocks = 0;
  std::string kv_cache_dtype;
  int64_t tensor_parallel_size = 0;
};

class Metrics {
 public:
  explicit Metrics(const std::string& model_name);
  ~Metrics();

  const prometheus::Registry& registry() const;

  // `reason`: the status code's name, in lower case.
  void RequestRejected(const absl::Status& status);
  void FirstToken(absl::Duration since_arrival);
  void NextToken(absl::Duration since_last);
  void RequestFinished(const absl::Status& status, const v1::Finish& summary,
                       absl::Duration since_arrival);

  void SchedulerState(const SchedulerStats& stats);
  void GroupFormed(const CacheConfigInfo& info);
  void GroupLost();
  // One series per rank; `address` is the worker's.
  void WorkerUp(int64_t rank, const std::string& address, bool up);

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace kvasir::coordinator
