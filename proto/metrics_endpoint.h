// HTTP server for the metrics and health of every process: GET /metrics (Prometheus text) and GET
// /health (200 when ready, 503 with the reason when not). prometheus-cpp keeps the registry; its
// own server cannot run beside cuBLASLt (docs/architecture.md).
//
// Probes never wait for scrapers or slow clients: one thread talks to all of them and never blocks,
// another writes the text of the metrics, once for all who wait for it. A TLS
// handshake and request that are not complete after 5 s and a client that does not take its answer
// within 10 s are cut off. When there are 64 connections the oldest gives way to a new one. A
// connection serves one request.
//
// Thread-safe after Start. The registry and the health function must outlive the endpoint. The
// health function must not block: the thread that serves everybody calls it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prometheus/registry.h"

#include "proto/security/tls.h"

namespace kvasir::proto {

struct MetricsEndpointOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free port
  const prometheus::Registry* registry = nullptr;
  std::function<absl::Status()> health;      // OK: ready
  std::shared_ptr<ServerTls> tls = nullptr;  // null: plain
};

class MetricsEndpoint {
 public:
  // UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(MetricsEndpointOptions options);
  virtual ~MetricsEndpoint() = default;  // stops listening
  virtual int port() const = 0;
};

}  // namespace kvasir::proto
