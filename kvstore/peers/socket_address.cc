#include "kvstore/peers/socket_address.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <ifaddrs.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvasir::kvstore {
namespace {

bool SameHost(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

absl::StatusOr<SocketAddress> Look(const std::string& host, const std::string& port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no address at '", host, "', port ", port, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  return address;
}

}  // namespace

std::string SocketAddress::ToString() const {
  std::array<char, NI_MAXHOST> host = {};
  std::array<char, NI_MAXSERV> port = {};
  const int error = getnameinfo(get(), size, host.data(), host.size(), port.data(), port.size(),
                                NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return "an unknown address";
  const bool is_v6 = storage.ss_family == AF_INET6;
  return absl::StrCat(is_v6 ? "[" : "", host.data(), is_v6 ? "]:" : ":", port.data());
}

absl::StatusOr<HostPort> SplitHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  HostPort split;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &split.port)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not HOST:PORT"));
  }
  split.host = text.substr(0, colon);
  return split;
}

absl::StatusOr<SocketAddress> Resolve(const std::string& host, int port) {
  return Look(host, std::to_string(port), 0);
}

absl::StatusOr<SocketAddress> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not HOST:PORT"));
  }
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return Look(host, text.substr(colon + 1), AI_NUMERICHOST | AI_NUMERICSERV);
}

absl::StatusOr<std::string> DeviceOf(const SocketAddress& address) {
  ifaddrs* devices = nullptr;
  if (getifaddrs(&devices) != 0) {
    return absl::InternalError(absl::StrCat("listing network devices: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(devices, freeifaddrs);
  for (const ifaddrs* device = devices; device != nullptr; device = device->ifa_next) {
    if (device->ifa_addr != nullptr && SameHost(*device->ifa_addr, *address.get())) {
      return std::string(device->ifa_name);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      address.ToString(), " is no address of this machine; name one that peers can reach"));
}

}  // namespace kvasir::kvstore
