// Metrics of KV that lies on disk while it is in use: lean blocks, and the cache of their pages. A
// part of the worker's metrics (metrics.h). Thread-compatible.
#pragma once

#include <cstdint>

#include "prometheus/registry.h"

#include "kvstore/kv_store.h"
#include "worker/metric_families.h"

namespace kvasir::worker {

struct PageFamilies {
  explicit PageFamilies(prometheus::Registry& registry);

  prometheus::Family<prometheus::Gauge>& lean_blocks;
  prometheus::Family<prometheus::Counter>& shed_blocks;
  prometheus::Family<prometheus::Counter>& reads;
  prometheus::Family<prometheus::Counter>& waits;
  prometheus::Family<prometheus::Counter>& wait_seconds;
  prometheus::Family<prometheus::Counter>& prefetches;
};

class PageSeries {
 public:
  PageSeries(PageFamilies& families, const prometheus::Labels& labels);

  void Record(const kvstore::KvStoreStats& stats);

 private:
  prometheus::Gauge& lean_blocks_;
  Following shed_, read_, failed_, waits_, wait_seconds_, used_, late_, wasted_;
};

}  // namespace kvasir::worker
