// Families of a worker's metrics, and series that follow totals. Used by the worker's metrics
// alone.
#pragma once

#include <cstdint>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"

namespace kvasir::worker {

inline prometheus::Family<prometheus::Counter>& AddCounter(prometheus::Registry& registry,
                                                           const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<prometheus::Gauge>& AddGauge(prometheus::Registry& registry,
                                                       const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

// A counter that follows a total which starts at 0 with each group.
struct Following {
  prometheus::Counter* counter = nullptr;
  double seen = 0;

  void Follow(double total) {
    counter->Increment(total - seen);
    seen = total;
  }
  void Follow(int64_t total) { Follow(static_cast<double>(total)); }
};

}  // namespace kvasir::worker
