// One process's end of the connections to peers, over UCX: links to other processes, through shared
// memory on one machine and TCP between machines. A message has a short header and a body of up to
// many MiB, which lands where the receiver says, without a copy where the transport can. It hides
// UCX, its thread, which sleeps when nothing moves, and the difference between transports. A
// process that has stopped looks like one that is slow: the handler must look for itself.
//
// The node does not know whom it talks to: proof of identity, formats and timeouts belong to the
// handler (worker/peers). A link that fails, for whatever reason, is lost once and for ever; the
// peer is reached again over a new one.
//
// All callbacks, and all functions except Create, Post, address and the destructor, run on the
// node's own thread. Post is thread-safe. A callback must not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/strong_id.h"

namespace kvasir::kvstore {

using PeerLink = kernels::StrongId<struct PeerLinkTag>;  // never the same twice

// Limits of a message. Larger ones are not sent, and end the link when they are received.
inline constexpr size_t kMostHeaderBytes = 64;
inline constexpr size_t kMostBodyBytes = size_t{1} << 30;

class PeerNode;

class PeerHandler {
 public:
  virtual ~PeerHandler() = default;

  // Called once, before all others, with the node that calls.
  virtual void OnStart(PeerNode& node) = 0;
  // Another process has opened a link to this one.
  virtual void OnLink(PeerLink link) = 0;
  // A message begins. Returns memory for its body, of exactly `body_bytes`, which stays untouched
  // by others until OnMessage or OnLost; nullopt ends the link. `header` is valid during the call.
  virtual std::optional<absl::Span<std::byte>> PlaceOf(PeerLink link,
                                                       absl::Span<const std::byte> header,
                                                       size_t body_bytes) = 0;
  // The body of a message lies where PlaceOf said. Bodies may arrive in another order than they
  // were sent.
  virtual void OnMessage(PeerLink link, absl::Span<const std::byte> header,
                         absl::Span<std::byte> body) = 0;
  // The link is lost. From now on the node touches no memory that was given to it: neither places
  // of bodies nor bodies that were being sent.
  virtual void OnLost(PeerLink link, const absl::Status& why) = 0;
  // About every PeerNodeOptions::tick.
  virtual void OnTick() = 0;
};

struct PeerNodeOptions {
  // Address on which other processes reach this one, and whose network device TCP uses.
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free one
  // UCX's names of the transports that may be used, separated by commas. "tcp" is needed to open
  // links; with "sm", or a part of it ("posix", "sysv"), bodies go through shared memory within a
  // machine.
  std::string transports = "sm,tcp";
  int tick_ms = 100;
};

class PeerNode {
 public:
  // Listens on the address and starts the thread. `handler` outlives the node. INVALID_ARGUMENT for
  // a host that is no address of this machine, UNAVAILABLE with UCX's reason.
  static absl::StatusOr<std::unique_ptr<PeerNode>> Create(const PeerNodeOptions& options,
                                                          PeerHandler& handler);
  // Ends all links, without OnLost, and the thread. Afterwards no memory is touched.
  virtual ~PeerNode() = default;

  // HOST:PORT on which it listens, as numbers, which Open takes.
  virtual const std::string& address() const = 0;
  // Runs `work` on the node's thread, soon. Work posted before the destructor begins is run.
  virtual void Post(std::function<void()> work) = 0;

  // --- on the node's thread

  // Opens a link to the node of that address. Messages may be sent at once. INVALID_ARGUMENT for
  // what is no address; the link to a peer that cannot be reached is lost later.
  virtual absl::StatusOr<PeerLink> Open(const std::string& address) = 0;
  // Sends a message. `body` stays valid until `on_sent` is called, never within this call, or the
  // link is lost; if it changes meanwhile, the receiver gets a mixture. Ignored on a lost link.
  // REQUIRES: header and body are within the limits.
  virtual void Send(PeerLink link, absl::Span<const std::byte> header,
                    absl::Span<const std::byte> body, std::function<void()> on_sent) = 0;
  // Ends a link. OnLost is called with `why`, later. Ignored on a lost link.
  virtual void Close(PeerLink link, const absl::Status& why) = 0;
};

}  // namespace kvasir::kvstore
