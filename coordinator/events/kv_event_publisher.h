// Publishes what happens to the prefix cache over ZeroMQ, for routers that send a prompt where its
// prefix is cached. It hides sockets, numbering and what is kept for replay. Made by the server,
// called by the engine loop's thread through BlockListener; a thread of its own sends. Thread-safe.
//
// PUB socket: frames [topic, sequence number, batch]; numbers are 8 bytes, big-endian, and rise by
// one. A subscriber that sees a gap asks the ROUTER socket: [empty, first number wanted]. It
// answers [empty, number, batch] for each batch that is kept from there on, then [empty, -1,
// empty].
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "kvstore/index/block_listener.h"

namespace kvasir::coordinator {

struct KvEventOptions {
  std::string endpoint;  // of the PUB socket, "tcp://127.0.0.1:5557"; port * takes a free one
  std::string replay_endpoint;  // of the ROUTER socket; empty: no replay
  std::string topic;
};

class KvEventPublisher : public kvstore::BlockListener {
 public:
  // INVALID_ARGUMENT when an endpoint cannot be bound.
  static absl::StatusOr<std::unique_ptr<KvEventPublisher>> Start(const KvEventOptions& options);

  // The addresses that were bound.
  virtual std::string endpoint() const = 0;
  virtual std::string replay_endpoint() const = 0;
};

}  // namespace kvasir::coordinator
