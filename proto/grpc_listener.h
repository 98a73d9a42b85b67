// Accepts the connections of a gRPC server and hands them to it. gRPC limits neither their number
// nor the memory taken by messages that never end. The listener does, by these limits:
//
//   number      at most a quarter of the descriptors that the process may open (each takes two) and
//               at most 4,096. When that number is reached, the oldest connection that carries no
//               call gives way to a new one; when all carry calls, the new one is refused.
//   time        10 s for the TLS handshake and to begin to speak HTTP/2; 5 minutes without a call;
//               20 s for a host that answers nothing. A connection that the other host no longer
//               knows, because its end was lost on the way, ends at the next probe: after 1 s.
//   memory      256 MiB of received bytes, over all connections, that no finished message accounts
//               for. Above that, the connection with the most of them is closed. A connection may
//               send 4 KiB a second that belong to no message (headers, pings, cancelled calls).
//   packing     compressed messages are refused (UNIMPLEMENTED): gRPC unpacks them before it checks
//               their length.
//
// It hides sockets, the thread that accepts, how gRPC takes a connection. Made by coordinator and
// worker, beside their grpc::Server. Thread-safe; AddTo, Start and Stop are called by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_builder.h"
#include "prometheus/registry.h"

#include "proto/security/tls.h"

namespace kvasir::proto {

struct GrpcListenerOptions {
  std::string address;                       // as ListenOn takes it (sockets.h)
  std::shared_ptr<ServerTls> tls = nullptr;  // null: plain, as unix: always is
  prometheus::Registry* registry = nullptr;  // outlives the listener
  // Called on the listener's thread when status() has changed. It must not call the listener.
  std::function<void(const absl::Status&)> on_status = {};
  int64_t most_connections = 0;  // 0: derived from the process's limit of descriptors
  int64_t most_unfinished_bytes = 256ll << 20;
};

class GrpcListener {
 public:
  // A live call: its connection does not give way to another one. The call ends with this object.
  class Call {
   public:
    virtual ~Call() = default;
  };

  // UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<GrpcListener>> Listen(GrpcListenerOptions options);
  virtual ~GrpcListener() = default;  // Stop

  virtual int port() const = 0;
  // Gives the server its connections and their limits; it needs no other port.
  virtual void AddTo(grpc::ServerBuilder& builder) = 0;
  // Accepts from now on. REQUIRES: the server of AddTo runs.
  virtual void Start() = 0;
  // Stops accepting. Called before the server is shut down.
  virtual void Stop() = 0;

  // UNAVAILABLE, with the reason, while new connections are refused.
  virtual absl::Status status() const = 0;

  // `peer` is the result of grpc::ServerContext::peer. The listener outlives the call.
  virtual std::unique_ptr<Call> BeginCall(const std::string& peer) = 0;
  // Records that a message of `bytes` from `peer` is complete: its receiver accounts for its memory
  // from now on.
  virtual void OnMessage(const std::string& peer, size_t bytes) = 0;
};

}  // namespace kvasir::proto
