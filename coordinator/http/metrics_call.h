// GET /metrics of the HTTP API: the same text as that of the metrics port, written on a thread of
// its own, once for all who wait. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "prometheus/registry.h"

#include "coordinator/http/transport/exchange.h"
#include "kernels/base/mutex.h"
#include "proto/metrics_text.h"

namespace kvasir::coordinator {

class MetricsCall {
 public:
  explicit MetricsCall(const prometheus::Registry& registry)
      : text_(registry, [this] { OnText(); }) {}

  void Answer(std::shared_ptr<Exchange> exchange) EXCLUDES(mu_);

 private:
  void OnText() EXCLUDES(mu_);

  kernels::Mutex mu_;
  // Who waits, each with the number of the text that answers it.
  std::vector<std::pair<int64_t, std::shared_ptr<Exchange>>> waiting_ GUARDED_BY(mu_);
  proto::MetricsText text_;  // last: its thread uses everything above
};

}  // namespace kvasir::coordinator
