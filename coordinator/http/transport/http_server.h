// An HTTP/1.1 server for many streams on two threads. Its limits:
//
//   number    at most a quarter of the descriptors that the process may open, and at most 4,096
//             connections. When that number is reached, the oldest one that waits for a request, or
//             for the rest of one, gives way; when all are being answered, the new one is refused.
//   time      10 s for a TLS handshake and as much for a head, 60 s for a body, 60 s between two
//   requests; a client that takes
//             nothing of its answer for `client_timeout` is gone.
//   memory    16 KiB a head and `most_body_bytes` a body, of which nothing is taken before it has
//             come; 256 MiB of bodies that are arriving, over all connections, not counting the
//             first 64 KiB of each. Of an answer one piece is held; the rest waits in its source.
//
// It hides sockets, TLS, threads, keep-alive, pipelining and chunks. Made by the HTTP front.
// Thread-safe; Stop is called by one thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "prometheus/registry.h"

#include "coordinator/http/transport/exchange.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

struct HttpServerOptions {
  std::string host;
  int port = 0;                              // 0: any free one
  prometheus::Registry* registry = nullptr;  // outlives the server
  HttpHandler handler;                       // called on the server's threads
  absl::Duration client_timeout = absl::Seconds(60);
  size_t most_body_bytes = size_t{64} << 20;
  std::shared_ptr<proto::ServerTls> tls = nullptr;  // null: plain
  size_t most_connections = 0;  // 0: derived from the process's limit of descriptors
};

class HttpServer {
 public:
  // Listens and serves. UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpServerOptions options);
  virtual ~HttpServer() = default;  // calls Stop with no grace

  virtual int port() const = 0;
  // Stops accepting, waits at most `grace` for answers that are being written, and closes all
  // connections. Afterwards no handler runs.
  virtual void Stop(absl::Duration grace) = 0;
};

}  // namespace kvasir::coordinator
