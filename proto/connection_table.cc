#include "proto/connection_table.h"

#include <algorithm>
#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace kvasir::proto {

using kernels::MutexLock;

namespace {

constexpr uint64_t kFreeBytesPerSecond = 4096;
// Bytes of headers and frames around a message, and of TLS records and HTTP/2 frames in it: 38
// bytes to each 16 KiB.
constexpr uint64_t kBytesAroundMessage = 1024;
constexpr uint64_t kMessageBytesPerFrameByte = 256;

// Returns the name that gRPC gives the peer, with the brackets of IPv6, which some releases write
// as %5B and %5D. Empty for unix sockets, whose peers have no names.
std::string PeerOf(int socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return "";
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v6.sin6_port));
  }
  inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  return absl::StrCat("ipv6:[", text, "]:", ntohs(v6.sin6_port));
}

std::string Normalized(const std::string& peer) {
  return absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}});
}

uint64_t BytesReceived(int socket) {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
  return info.tcpi_bytes_received;
}

}  // namespace

ConnectionTable::Series::Series(prometheus::Registry& registry) {
  open = &prometheus::BuildGauge()
              .Name("kvasir_connections")
              .Help("Open connections of the gRPC port.")
              .Register(registry)
              .Add({});
  unfinished_bytes = &prometheus::BuildGauge()
                          .Name("kvasir_unfinished_message_bytes")
                          .Help("Received on the gRPC port for messages that are not complete.")
                          .Register(registry)
                          .Add({});
  auto& dropped = prometheus::BuildCounter()
                      .Name("kvasir_connections_dropped_total")
                      .Help("Connections of the gRPC port that were closed for others.")
                      .Register(registry);
  dropped_idle = &dropped.Add({{"reason", "idle"}});
  dropped_unfinished = &dropped.Add({{"reason", "unfinished_bytes"}});
}

class ConnectionTable::LiveCall final : public GrpcListener::Call {
 public:
  LiveCall(ConnectionTable& table, uint64_t connection) : table_(table), connection_(connection) {}
  ~LiveCall() override { table_.EndCall(connection_); }

 private:
  ConnectionTable& table_;
  const uint64_t connection_;
};

ConnectionTable::ConnectionTable(const GrpcListenerOptions& options, int64_t most_connections,
                                 int epoll)
    : most_connections_(most_connections),
      most_unfinished_bytes_(static_cast<uint64_t>(options.most_unfinished_bytes)),
      epoll_(epoll),
      series_(*options.registry),
      warnings_(options.address) {}

bool ConnectionTable::Add(Descriptor socket) {
  MutexLock lock(mu_);
  if (!MakeRoom()) return false;
  const uint64_t id = next_id_++;
  Connection& connection = connections_[id];
  connection.peer = PeerOf(socket.get());
  connection.socket = std::move(socket);
  if (!connection.peer.empty()) by_peer_[connection.peer] = id;
  Watch(id, connection, connection.peer.empty() ? Interest::kEnd : Interest::kBytes, EPOLL_CTL_ADD);
  series_.open->Set(static_cast<double>(connections_.size()));
  return true;
}

void ConnectionTable::OnEvent(uint64_t id, uint32_t events) {
  MutexLock lock(mu_);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    Remove(found);
  } else {
    Watch(id, found->second, Interest::kEnd, EPOLL_CTL_MOD);
    busy_.push_back(id);
  }
}

bool ConnectionTable::ManyAreClosing() const {
  MutexLock lock(mu_);
  return closing_ > most_connections_ / 2;
}

bool ConnectionTable::Full() const {
  MutexLock lock(mu_);
  return static_cast<int64_t>(connections_.size()) - closing_ >= most_connections_ &&
         std::none_of(connections_.begin(), connections_.end(), [](const auto& entry) {
           return !entry.second.closing && entry.second.calls == 0 && !entry.second.peer.empty();
         });
}

bool ConnectionTable::MakeRoom() {
  if (static_cast<int64_t>(connections_.size()) - closing_ < most_connections_) return true;
  for (auto& [id, connection] : connections_) {
    if (connection.closing || connection.calls > 0 || connection.peer.empty()) continue;
    Close(connection);
    series_.dropped_idle->Increment();
    warnings_.Warn(
        absl::StrCat(most_connections_,
                     " connections are open: the oldest without a call gave way to a new one"));
    return true;
  }
  return false;
}

// Counts every busy connection. One that sent nothing since the last count is watched again.
void ConnectionTable::CountBytes() {
  const SteadyClock::time_point now = SteadyClock::now();
  MutexLock lock(mu_);
  std::vector<uint64_t> still_busy;
  for (const uint64_t id : busy_) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Connection& connection = found->second;
    const uint64_t before = connection.received;
    Sample(connection, now);
    if (connection.received != before) {
      still_busy.push_back(id);
    } else {
      Watch(id, connection, Interest::kBytes, EPOLL_CTL_MOD);
    }
  }
  busy_ = std::move(still_busy);
  // Updated before the limit acts, so that a burst between two counts is seen as one.
  most_unfinished_ = std::max(most_unfinished_, unfinished_);
  while (unfinished_ > most_unfinished_bytes_) CloseTheLargest();
}

// The number of unfinished bytes also falls without new ones: connections end, messages complete.
bool ConnectionTable::BurstIsOver() {
  MutexLock lock(mu_);
  series_.unfinished_bytes->Set(static_cast<double>(unfinished_));
  if (most_unfinished_ <= kWorthTrimming || unfinished_ >= most_unfinished_ / 2) return false;
  most_unfinished_ = unfinished_;
  return true;
}

void ConnectionTable::Sample(Connection& connection, SteadyClock::time_point now) {
  if (connection.closing || connection.peer.empty()) return;
  const auto elapsed = std::chrono::duration<double>(now - connection.sampled_at).count();
  connection.sampled_at = now;
  unfinished_ -= connection.unfinished();
  connection.received = std::max(connection.received, BytesReceived(connection.socket.get()));
  connection.accounted += static_cast<uint64_t>(elapsed * double{kFreeBytesPerSecond});
  connection.accounted = std::min(connection.accounted, connection.received);
  unfinished_ += connection.unfinished();
}

void ConnectionTable::CloseTheLargest() {
  const auto largest = std::max_element(
      connections_.begin(), connections_.end(),
      [](const auto& a, const auto& b) { return a.second.unfinished() < b.second.unfinished(); });
  warnings_.Warn(absl::StrCat(unfinished_, " bytes of unfinished messages are more than ",
                              most_unfinished_bytes_, ": closing the connection with ",
                              largest->second.unfinished(), " of them"));
  Close(largest->second);
  series_.dropped_unfinished->Increment();
}

// The end of a connection is always reported. Bytes of a busy one are not, because this thread
// would be woken for every packet.
void ConnectionTable::Watch(uint64_t id, const Connection& connection, Interest interest,
                            int operation) {
  epoll_event event = {.events = EPOLLET, .data = {.u64 = id}};
  if (interest == Interest::kBytes) event.events |= EPOLLIN;
  epoll_ctl(epoll_, operation, connection.socket.get(), &event);
}

void ConnectionTable::Close(Connection& connection) {
  connection.closing = true;
  ++closing_;
  unfinished_ -= connection.unfinished();
  connection.accounted = connection.received;
  shutdown(connection.socket.get(), SHUT_RDWR);
}

void ConnectionTable::Remove(Connections::iterator connection) {
  if (connection->second.closing) --closing_;
  unfinished_ -= connection->second.unfinished();
  const auto named = by_peer_.find(connection->second.peer);
  if (named != by_peer_.end() && named->second == connection->first) by_peer_.erase(named);
  connections_.erase(connection);
  series_.open->Set(static_cast<double>(connections_.size()));
}

ConnectionTable::Connections::iterator ConnectionTable::Find(const std::string& peer) {
  const auto named = by_peer_.find(Normalized(peer));
  return named == by_peer_.end() ? connections_.end() : connections_.find(named->second);
}

std::unique_ptr<GrpcListener::Call> ConnectionTable::BeginCall(const std::string& peer) {
  MutexLock lock(mu_);
  const auto found = Find(peer);
  if (found == connections_.end()) return nullptr;
  ++found->second.calls;
  return std::make_unique<LiveCall>(*this, found->first);
}

void ConnectionTable::EndCall(uint64_t connection) {
  MutexLock lock(mu_);
  const auto found = connections_.find(connection);
  if (found != connections_.end()) --found->second.calls;
}

void ConnectionTable::OnMessage(const std::string& peer, size_t bytes) {
  MutexLock lock(mu_);
  const auto found = Find(peer);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  Sample(connection, SteadyClock::now());
  unfinished_ -= connection.unfinished();
  connection.accounted =
      std::min(connection.received, connection.accounted + bytes +
                                        bytes / kMessageBytesPerFrameByte + kBytesAroundMessage);
  unfinished_ += connection.unfinished();
}

}  // namespace kvasir::proto
