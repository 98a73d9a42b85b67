// The HTTP side door of every process: GET /metrics (Prometheus text) and GET /health (200 when
// ready, 503 with the reason when not). prometheus-cpp keeps the registry; its own server cannot
// run beside cuBLASLt (docs/architecture.md), so cpp-httplib serves the text. Thread-safe after
// Start; the registry and the health function must outlive the endpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prometheus/registry.h"

namespace kvasir::proto {

struct MetricsEndpointOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free one
  const prometheus::Registry* registry = nullptr;
  std::function<absl::Status()> health;  // OK: ready
};

class MetricsEndpoint {
 public:
  // UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(MetricsEndpointOptions options);
  virtual ~MetricsEndpoint() = default;  // stops listening
  virtual int port() const = 0;
};

}  // namespace kvasir::proto
