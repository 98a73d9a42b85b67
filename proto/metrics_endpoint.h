// The HTTP side door of every process: GET /metrics (Prometheus text) and GET /health (200 when
// ready, 503 with the reason when not). prometheus-cpp keeps the registry; its own server cannot
// run beside cuBLASLt (docs/architecture.md).
//
// Probes never wait for scrapers, nor for clients that are slow: one thread talks to all of them
// and never blocks, another one writes the text of the metrics, once for all who wait for it. A
// request that is not complete after 5 s and a client that does not take its answer within 10 s are
// cut; of 64 connections the oldest gives way to a new one. A connection serves one request.
//
// Thread-safe after Start; the registry and the health function must outlive the endpoint. The
// health function is called on the thread that serves everybody: it must not block.
#pragma once

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
