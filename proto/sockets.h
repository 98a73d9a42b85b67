// Listening sockets for the servers that accept their connections themselves (grpc_listener.h,
// metrics_endpoint.h). It hides addresses and socket options. Thread-compatible.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::proto {

// Owns a descriptor and closes it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~Descriptor() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Close();

 private:
  int fd_ = -1;
};

struct ListeningSockets {
  std::vector<Descriptor> sockets;  // one for each address of the host; non-blocking
  int port = 0;                     // of all of them; 0 for unix:
};

// `address` is HOST:PORT (an IPv6 address with or without brackets; port 0: any free one) or
// unix:PATH, where an existing socket at PATH is replaced. UNAVAILABLE when it cannot be listened
// on: a port in use is never shared.
absl::StatusOr<ListeningSockets> ListenOn(const std::string& address);

bool IsUnixAddress(absl::string_view address);

// Returns true when `address` (as ListenOn takes it) can be reached from other machines. False
// where nothing can be listened on.
bool IsOpenToOtherMachines(const std::string& address);

}  // namespace kvasir::proto
