// Addresses as UCX takes them, and the network device that an address of this machine belongs to.
// Used by the peer node.
#pragma once

#include <string>
#include <sys/socket.h>

#include "absl/status/statusor.h"

namespace kvasir::kvstore {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string ToString() const;  // "127.0.0.1:80", "[::1]:80"
};

struct HostPort {
  std::string host;
  int port = 0;
};

// Splits HOST:PORT at its last colon; INVALID_ARGUMENT.
absl::StatusOr<HostPort> SplitHostPort(const std::string& text);
// `host` is a name or an address. INVALID_ARGUMENT when it cannot be resolved. Blocks.
absl::StatusOr<SocketAddress> Resolve(const std::string& host, int port);
// Reads what ToString writes; INVALID_ARGUMENT.
absl::StatusOr<SocketAddress> ParseAddress(const std::string& text);
// Returns the name of the network device that has the address; INVALID_ARGUMENT when none has.
absl::StatusOr<std::string> DeviceOf(const SocketAddress& address);

}  // namespace kvasir::kvstore
