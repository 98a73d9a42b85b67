// The open connections of a GrpcListener: how many calls each carries, and how many bytes each has
// sent for messages that are not complete. Chooses the connection that gives way when a new one
// needs room, or when unfinished bytes exceed their limit. The limits are in grpc_listener.h.
//
// It hides the names of peers and how bytes are counted. Thread-safe; methods marked "listener's
// thread" are called by that thread alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/process/rare_warnings.h"
#include "proto/sockets.h"

namespace kvasir::proto {

// Unfinished bytes of a burst after which freed memory is worth giving back.
constexpr uint64_t kWorthTrimming = 32u << 20;

class ConnectionTable {
 public:
  // Reads options of the listener. `epoll` outlives the table; it reports events of connections by
  // their ids, which count up from 0.
  ConnectionTable(const GrpcListenerOptions& options, int64_t most_connections, int epoll);

  // --- the listener's thread ---

  // Adds a connection. Returns false when there is no room and none can be made.
  bool Add(Descriptor socket) EXCLUDES(mu_);
  // Takes an epoll event of connection `id`.
  void OnEvent(uint64_t id, uint32_t events) EXCLUDES(mu_);
  bool AnyBusy() const { return !busy_.empty(); }
  void CountBytes() EXCLUDES(mu_);
  // Returns true once after each burst.
  bool BurstIsOver() EXCLUDES(mu_);
  bool InBurst() const { return most_unfinished_ > kWorthTrimming; }

  // --- any thread ---

  // Returns true when so many connections are about to close that others must wait.
  bool ManyAreClosing() const EXCLUDES(mu_);
  // Returns true when a new connection would find no room.
  bool Full() const EXCLUDES(mu_);
  std::unique_ptr<GrpcListener::Call> BeginCall(const std::string& peer) EXCLUDES(mu_);
  void OnMessage(const std::string& peer, size_t bytes) EXCLUDES(mu_);

 private:
  using SteadyClock = std::chrono::steady_clock;

  // A connection as the listener sees it. Its socket is a second descriptor for gRPC's socket, so
  // that closing it can never close another connection that took the number.
  struct Connection {
    Descriptor socket;
    std::string peer;
    int64_t calls = 0;
    bool closing = false;  // told to close; gRPC has not released it yet
    uint64_t received = 0;
    uint64_t accounted = 0;  // part of `received` that messages and the allowance for other bytes
                             // account for
    SteadyClock::time_point sampled_at = SteadyClock::now();

    uint64_t unfinished() const { return received - accounted; }
  };
  using Connections = std::map<uint64_t, Connection>;  // by age
  enum class Interest { kEnd, kBytes };
  struct Series {
    explicit Series(prometheus::Registry& registry);
    prometheus::Gauge* open;
    prometheus::Gauge* unfinished_bytes;
    prometheus::Counter* dropped_idle;
    prometheus::Counter* dropped_unfinished;
  };
  class LiveCall;

  bool MakeRoom() REQUIRES(mu_);
  void Sample(Connection& connection, SteadyClock::time_point now) REQUIRES(mu_);
  void CloseTheLargest() REQUIRES(mu_);
  void Watch(uint64_t id, const Connection& connection, Interest interest, int operation);
  void Close(Connection& connection) REQUIRES(mu_);
  void Remove(Connections::iterator connection) REQUIRES(mu_);
  // Returns connections_.end() for a peer without a connection.
  Connections::iterator Find(const std::string& peer) REQUIRES(mu_);
  void EndCall(uint64_t connection) EXCLUDES(mu_);

  const int64_t most_connections_;
  const uint64_t most_unfinished_bytes_;
  const int epoll_;
  const Series series_;

  // The listener's thread.
  std::vector<uint64_t> busy_;    // connections that sent bytes since the last look
  uint64_t most_unfinished_ = 0;  // since the last burst was over
  RareWarnings warnings_;

  mutable kernels::Mutex mu_;
  Connections connections_ GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, uint64_t> by_peer_ GUARDED_BY(mu_);
  int64_t closing_ GUARDED_BY(mu_) = 0;
  uint64_t unfinished_ GUARDED_BY(mu_) = 0;  // over all connections
  uint64_t next_id_ GUARDED_BY(mu_) = 0;
};

}  // namespace kvasir::proto
