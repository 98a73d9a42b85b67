// A Prometheus registry that also shows the process itself: processor time, memory, open files and
// start under the names that Prometheus' own clients use, the release, and the lines that the log
// lost. They are read from /proc by each scrape. The registry of every server. Thread-safe.
#pragma once

#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/registry.h"

namespace kvasir::proto {

class ProcessRegistry final : public prometheus::Registry {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace kvasir::proto
