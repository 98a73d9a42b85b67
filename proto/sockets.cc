#include "proto/sockets.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"

namespace kvasir::proto {
namespace {

constexpr absl::string_view kUnix = "unix:";
constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

absl::Status CannotListen(const std::string& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", why));
}

void SetOption(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof(value));
}

absl::StatusOr<Descriptor> Bind(const std::string& address, Descriptor socket,
                                const sockaddr* where, socklen_t length) {
  if (!socket.valid() || bind(socket.get(), where, length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return CannotListen(address, std::strerror(errno));
  }
  return socket;
}

absl::StatusOr<ListeningSockets> ListenOnPath(const std::string& address) {
  const std::string path = address.substr(kUnix.size());
  sockaddr_un where = {};
  where.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(where.sun_path)) {
    return CannotListen(
        address, absl::StrCat("the path has ", path.size(), " bytes, a socket's may have 1 to ",
                              sizeof(where.sun_path) - 1));
  }
  path.copy(where.sun_path, path.size());
  struct stat found = {};
  if (lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) unlink(path.c_str());
  ListeningSockets listening;
  KVASIR_ASSIGN_OR_RETURN(Descriptor bound,
                          Bind(address, Descriptor(socket(AF_UNIX, kSocketFlags, 0)),
                               reinterpret_cast<const sockaddr*>(&where), sizeof(where)));
  listening.sockets.push_back(std::move(bound));
  return listening;
}

void SetPort(sockaddr* where, int port) {
  const auto in_network_order = htons(static_cast<uint16_t>(port));
  if (where->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(where)->sin6_port = in_network_order;
  } else {
    reinterpret_cast<sockaddr_in*>(where)->sin_port = in_network_order;
  }
}

int BoundPort(int socket) {
  sockaddr_storage where = {};
  socklen_t length = sizeof(where);
  getsockname(socket, reinterpret_cast<sockaddr*>(&where), &length);
  return ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&where)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&where)->sin_port);
}

absl::StatusOr<Descriptor> ListenOnTcp(const std::string& address, const addrinfo& at) {
  Descriptor socket(::socket(at.ai_family, kSocketFlags, 0));
  SetOption(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  SetOption(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (at.ai_family == AF_INET6) SetOption(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  return Bind(address, std::move(socket), at.ai_addr, at.ai_addrlen);
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Returns the addresses of HOST:PORT.
absl::StatusOr<Addresses> Resolve(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return CannotListen(address, "it is not HOST:PORT or unix:PATH");
  absl::string_view host = absl::string_view(address).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(std::string(host).c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) return CannotListen(address, gai_strerror(error));
  return Addresses(found, &freeaddrinfo);
}

bool IsLoopback(const sockaddr& where) {
  if (where.sa_family == AF_INET6) {
    const in6_addr& host = reinterpret_cast<const sockaddr_in6&>(where).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&host) || (IN6_IS_ADDR_V4MAPPED(&host) && host.s6_addr[12] == 127);
  }
  const in_addr& host = reinterpret_cast<const sockaddr_in&>(where).sin_addr;
  return ntohl(host.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
}

}  // namespace

void Descriptor::Close() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

bool IsUnixAddress(absl::string_view address) { return absl::StartsWith(address, kUnix); }

absl::StatusOr<ListeningSockets> ListenOn(const std::string& address) {
  if (IsUnixAddress(address)) return ListenOnPath(address);
  KVASIR_ASSIGN_OR_RETURN(const Addresses found, Resolve(address));
  ListeningSockets listening;
  absl::Status why;
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    // Port 0 took any free port for the first address; the other addresses take the same one.
    if (listening.port != 0) SetPort(at->ai_addr, listening.port);
    absl::StatusOr<Descriptor> socket = ListenOnTcp(address, *at);
    why.Update(socket.status());
    if (!socket.ok()) continue;
    listening.port = BoundPort(socket->get());
    listening.sockets.push_back(*std::move(socket));
  }
  if (listening.sockets.empty()) return why;
  return listening;
}

bool IsOpenToOtherMachines(const std::string& address) {
  if (IsUnixAddress(address)) return false;
  const absl::StatusOr<Addresses> found = Resolve(address);
  if (!found.ok()) return false;
  for (const addrinfo* at = found->get(); at != nullptr; at = at->ai_next) {
    if (!IsLoopback(*at->ai_addr)) return true;
  }
  return false;
}

}  // namespace kvasir::proto
