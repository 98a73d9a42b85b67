#include "proto/grpc_listener.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <linux/tcp.h>
#include <malloc.h>
#include <map>
#include <netinet/in.h>
#include <optional>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "grpcpp/security/server_credentials.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/sockets.h"

namespace kvasir::proto {
namespace {

using kernels::MutexLock;
using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kMostConnections = 4096;
constexpr int64_t kDescriptorsPerConnection = 4;  // two, and as many for other uses
constexpr int kHandshakeMs = 10'000;
constexpr int kIdleMs = 300'000;
constexpr uint64_t kFreeBytesPerSecond = 4096;
// Bytes of headers and frames around a message.
constexpr uint64_t kBytesAroundMessage = 1024;
// Interval of counting while bytes come: at 1 GB/s the count is off by at most 20 MB.
constexpr milliseconds kTick(20);
// Interval of checking, while new connections are refused, whether that is over.
constexpr seconds kRefusalCheck(1);
// gRPC releases a closed connection's memory in its own time, later on a busy machine.
constexpr seconds kTrimInterval(1);
constexpr int kTrims = 5;
constexpr uint64_t kWorthTrimming = 32u << 20;
constexpr seconds kLogInterval(10);
// Unacknowledged bytes end a connection after this time. Milliseconds.
constexpr int kUserTimeoutMs = 20'000;

int64_t ConnectionsFor(int64_t most) {
  if (most > 0) return most;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto descriptors = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1u << 30));
  return std::clamp<int64_t>(descriptors / kDescriptorsPerConnection, 1, kMostConnections);
}

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

absl::Status TooManyFiles() {
  return absl::UnavailableError("the process has as many open files as it may; raise ulimit -n");
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

struct Series {
  explicit Series(prometheus::Registry& registry) {
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
    auto& refused = prometheus::BuildCounter()
                        .Name("kvasir_connections_refused_total")
                        .Help("New connections of the gRPC port that were closed at once.")
                        .Register(registry);
    refused_full = &refused.Add({{"reason", "full"}});
    refused_descriptors = &refused.Add({{"reason", "descriptors"}});
    auto& dropped = prometheus::BuildCounter()
                        .Name("kvasir_connections_dropped_total")
                        .Help("Connections of the gRPC port that were closed for others.")
                        .Register(registry);
    dropped_idle = &dropped.Add({{"reason", "idle"}});
    dropped_unfinished = &dropped.Add({{"reason", "unfinished_bytes"}});
  }

  prometheus::Gauge* open;
  prometheus::Gauge* unfinished_bytes;
  prometheus::Counter* refused_full;
  prometheus::Counter* refused_descriptors;
  prometheus::Counter* dropped_idle;
  prometheus::Counter* dropped_unfinished;
};

class AcceptingListener final : public GrpcListener {
 public:
  explicit AcceptingListener(GrpcListenerOptions options)
      : options_(std::move(options)),
        most_connections_(ConnectionsFor(options_.most_connections)),
        series_(*options_.registry) {}
  ~AcceptingListener() override { Stop(); }

  absl::Status Open();

  int port() const override { return listening_.port; }
  void AddTo(grpc::ServerBuilder& builder) override;
  void Start() override {
    thread_ = std::thread([this] { Run(); });
  }
  void Stop() override;
  absl::Status status() const override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return status_;
  }
  std::unique_ptr<Call> BeginCall(const std::string& peer) override EXCLUDES(mu_);
  void OnMessage(const std::string& peer, size_t bytes) override EXCLUDES(mu_);

 private:
  class LiveCall final : public Call {
   public:
    LiveCall(AcceptingListener& listener, uint64_t connection)
        : listener_(listener), connection_(connection) {}
    ~LiveCall() override { listener_.EndCall(connection_); }

   private:
    AcceptingListener& listener_;
    const uint64_t connection_;
  };
  using Connections = std::map<uint64_t, Connection>;  // by age
  enum class Interest { kEnd, kBytes };

  // The listener's thread.
  void Run() EXCLUDES(mu_);
  int WaitMs() const;
  void AcceptAll() EXCLUDES(mu_);
  // Returns false when the rest must wait: too many connections are about to close.
  bool AcceptFrom(int listening_socket) EXCLUDES(mu_);
  enum class Refused { kOne, kNobodyWaits, kNoDescriptor };
  Refused RefuseForDescriptors(int listening_socket) EXCLUDES(mu_);
  void Admit(Descriptor socket) EXCLUDES(mu_);
  // Returns false when there is no room and none can be made.
  bool MakeRoom() REQUIRES(mu_);
  void Refuse(prometheus::Counter& counter, const absl::Status& why) EXCLUDES(mu_);
  void LookWhetherRefusing() EXCLUDES(mu_);
  void SetStatus(const absl::Status& status) EXCLUDES(mu_);
  void OnEvent(uint64_t id, uint32_t events) EXCLUDES(mu_);
  void CountBytes() EXCLUDES(mu_);
  void LookWhetherABurstIsOver() EXCLUDES(mu_);
  void Sample(Connection& connection, SteadyClock::time_point now) REQUIRES(mu_);
  void CloseTheLargest() REQUIRES(mu_);
  void GiveBackMemory();
  void Watch(uint64_t id, const Connection& connection, Interest interest, int operation);

  void Close(Connection& connection) REQUIRES(mu_);
  void Remove(Connections::iterator connection) REQUIRES(mu_);
  Connection* Find(const std::string& peer) REQUIRES(mu_);
  void EndCall(uint64_t connection) EXCLUDES(mu_);
  // Logs at most one line per interval, because its cause may come often.
  void Warn(const std::string& text);

  const GrpcListenerOptions options_;
  const int64_t most_connections_;
  Series series_;
  ListeningSockets listening_;
  Descriptor epoll_, wake_;
  Descriptor spare_;  // closed for a moment to accept, and refuse, a connection when none is free
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_;

  // The listener's thread.
  std::vector<uint64_t> busy_;  // connections that sent bytes since the last look
  bool stopping_ = false;
  bool backlog_ = false;          // connections may wait to be accepted
  uint64_t most_unfinished_ = 0;  // since the last burst was over
  std::optional<SteadyClock::time_point> trim_at_;
  int trims_left_ = 0;
  std::optional<SteadyClock::time_point> refused_at_;  // last refusal; set while status_ is bad
  SteadyClock::time_point logged_at_ = {};

  mutable kernels::Mutex mu_;
  absl::Status status_ GUARDED_BY(mu_);
  Connections connections_ GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, uint64_t> by_peer_ GUARDED_BY(mu_);
  int64_t closing_ GUARDED_BY(mu_) = 0;
  uint64_t unfinished_ GUARDED_BY(mu_) = 0;  // over all connections
  uint64_t next_id_ GUARDED_BY(mu_) = 0;

  std::thread thread_;  // last: it uses everything above
};

// Ids for epoll events of other descriptors than connections; connection ids count up from 0.
constexpr uint64_t kWakeId = ~uint64_t{0};
constexpr uint64_t kFirstListeningId = kWakeId - 64;

absl::Status AcceptingListener::Open() {
  KVASIR_ASSIGN_OR_RETURN(listening_, ListenOn(options_.address));
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto add = [this](int socket, uint64_t id) {
    epoll_event event = {.events = EPOLLIN | EPOLLET, .data = {.u64 = id}};
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) == 0;
  };
  bool added = add(wake_.get(), kWakeId);
  for (size_t i = 0; i < listening_.sockets.size(); ++i) {
    const int socket = listening_.sockets[i].get();
    if (listening_.port != 0) {
      setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
    }
    added = added && i < kWakeId - kFirstListeningId && add(socket, kFirstListeningId + i);
  }
  if (!added || !spare_.valid()) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.address, ": ",
                                               std::strerror(errno), "; raise ulimit -n"));
  }
  return absl::OkStatus();
}

void AcceptingListener::AddTo(grpc::ServerBuilder& builder) {
  using Experimental = grpc::ServerBuilder::experimental_type;
  grpc_ = builder.experimental().AddExternalConnectionAcceptor(
      Experimental::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // A message that claims to be compressed, in a call that names no algorithm, is not unpacked
  // either.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
}

void AcceptingListener::Stop() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  listening_.sockets.clear();
  if (IsUnixAddress(options_.address)) unlink(options_.address.c_str() + std::strlen("unix:"));
}

// --- the listener's thread ----------------------------------------------------------------------

void AcceptingListener::Run() {
  epoll_event events[64];
  while (!stopping_) {
    const int count = epoll_wait(epoll_.get(), events, std::size(events), WaitMs());
    for (int i = 0; i < count; ++i) OnEvent(events[i].data.u64, events[i].events);
    if (backlog_) AcceptAll();
    if (!busy_.empty()) CountBytes();
    LookWhetherABurstIsOver();
    GiveBackMemory();
    if (refused_at_.has_value() && SteadyClock::now() - *refused_at_ >= kRefusalCheck) {
      LookWhetherRefusing();
    }
  }
}

int AcceptingListener::WaitMs() const {
  if (backlog_ || !busy_.empty()) return static_cast<int>(kTick.count());
  if (trim_at_.has_value() || refused_at_.has_value() || most_unfinished_ > kWorthTrimming) {
    return static_cast<int>(milliseconds(kRefusalCheck).count());
  }
  return -1;
}

void AcceptingListener::OnEvent(uint64_t id, uint32_t events) {
  if (id == kWakeId) {
    stopping_ = true;
  } else if (id >= kFirstListeningId) {
    backlog_ = true;
  } else {
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
}

void AcceptingListener::AcceptAll() {
  backlog_ = false;
  for (const Descriptor& socket : listening_.sockets) {
    if (!AcceptFrom(socket.get())) backlog_ = true;
  }
}

bool AcceptingListener::AcceptFrom(int listening_socket) {
  while (true) {
    {
      MutexLock lock(mu_);
      if (closing_ > most_connections_ / 2) return false;
    }
    Descriptor socket(accept4(listening_socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      Admit(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      const Refused refused = RefuseForDescriptors(listening_socket);
      if (refused != Refused::kOne) return refused == Refused::kNobodyWaits;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return true;  // there is no other connection
    }
  }
}

// Refuses a waiting client, which would otherwise stay in the queue for nothing. accept also
// reports a lack of descriptors where nobody waits.
AcceptingListener::Refused AcceptingListener::RefuseForDescriptors(int listening_socket) {
  spare_.Close();
  const bool taken = Descriptor(accept4(listening_socket, nullptr, nullptr, SOCK_CLOEXEC)).valid();
  const bool nobody_waits = !taken && (errno == EAGAIN || errno == EWOULDBLOCK);
  spare_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (nobody_waits) return Refused::kNobodyWaits;
  Refuse(*series_.refused_descriptors, TooManyFiles());
  return taken ? Refused::kOne : Refused::kNoDescriptor;
}

void AcceptingListener::Admit(Descriptor socket) {
  Descriptor ours(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!ours.valid()) {
    return Refuse(
        *series_.refused_descriptors,
        absl::UnavailableError("the process has as many open files as it may; raise ulimit -n"));
  }
  bool room = false;
  {
    MutexLock lock(mu_);
    room = MakeRoom();
    if (room) {
      const uint64_t id = next_id_++;
      Connection& connection = connections_[id];
      connection.socket = std::move(ours);
      connection.peer = PeerOf(socket.get());
      if (!connection.peer.empty()) by_peer_[connection.peer] = id;
      Watch(id, connection, connection.peer.empty() ? Interest::kEnd : Interest::kBytes,
            EPOLL_CTL_ADD);
      series_.open->Set(static_cast<double>(connections_.size()));
    }
  }
  if (!room) {
    return Refuse(*series_.refused_full,
                  absl::UnavailableError(absl::StrCat(
                      most_connections_,
                      " connections carry calls, as many as there may be; raise ulimit -n "
                      "(a quarter of it counts, at most ",
                      kMostConnections, ")")));
  }
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
  parameters.fd = socket.Release();
  grpc_->HandleNewConnection(&parameters);
}

bool AcceptingListener::MakeRoom() {
  if (static_cast<int64_t>(connections_.size()) - closing_ < most_connections_) return true;
  for (auto& [id, connection] : connections_) {
    if (connection.closing || connection.calls > 0 || connection.peer.empty()) continue;
    Close(connection);
    series_.dropped_idle->Increment();
    Warn(absl::StrCat(most_connections_,
                      " connections are open: the oldest without a call gave way to a new one"));
    return true;
  }
  return false;
}

void AcceptingListener::Refuse(prometheus::Counter& counter, const absl::Status& why) {
  counter.Increment();
  refused_at_ = SteadyClock::now();
  SetStatus(why);
}

void AcceptingListener::LookWhetherRefusing() {
  if (!spare_.valid()) spare_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Descriptor another(fcntl(wake_.get(), F_DUPFD_CLOEXEC, 0));
  bool full = false;
  {
    MutexLock lock(mu_);
    full = static_cast<int64_t>(connections_.size()) - closing_ >= most_connections_ &&
           std::none_of(connections_.begin(), connections_.end(), [](const auto& entry) {
             return !entry.second.closing && entry.second.calls == 0 && !entry.second.peer.empty();
           });
  }
  if (full || !spare_.valid() || !another.valid()) return;
  refused_at_.reset();
  SetStatus(absl::OkStatus());
}

void AcceptingListener::SetStatus(const absl::Status& status) {
  {
    MutexLock lock(mu_);
    if (std::exchange(status_, status) == status) return;
  }
  if (status.ok()) {
    spdlog::info("{} accepts connections again", options_.address);
  } else {
    spdlog::error("{} refuses connections: {}", options_.address, std::string(status.message()));
  }
  if (options_.on_status) options_.on_status(status);
}

// --- bytes --------------------------------------------------------------------------------------

// Counts every busy connection. One that sent nothing since the last count is watched again.
void AcceptingListener::CountBytes() {
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
  while (unfinished_ > static_cast<uint64_t>(options_.most_unfinished_bytes)) CloseTheLargest();
}

// The number of unfinished bytes also falls without new ones: connections end, messages complete.
void AcceptingListener::LookWhetherABurstIsOver() {
  MutexLock lock(mu_);
  series_.unfinished_bytes->Set(static_cast<double>(unfinished_));
  if (most_unfinished_ <= kWorthTrimming || unfinished_ >= most_unfinished_ / 2) return;
  most_unfinished_ = unfinished_;
  trim_at_ = SteadyClock::now() + kTrimInterval;
  trims_left_ = kTrims;
}

void AcceptingListener::Sample(Connection& connection, SteadyClock::time_point now) {
  if (connection.closing || connection.peer.empty()) return;
  const auto elapsed = std::chrono::duration<double>(now - connection.sampled_at).count();
  connection.sampled_at = now;
  unfinished_ -= connection.unfinished();
  connection.received = std::max(connection.received, BytesReceived(connection.socket.get()));
  connection.accounted += static_cast<uint64_t>(elapsed * double{kFreeBytesPerSecond});
  connection.accounted = std::min(connection.accounted, connection.received);
  unfinished_ += connection.unfinished();
}

void AcceptingListener::CloseTheLargest() {
  const auto largest = std::max_element(
      connections_.begin(), connections_.end(),
      [](const auto& a, const auto& b) { return a.second.unfinished() < b.second.unfinished(); });
  Warn(absl::StrCat(unfinished_, " bytes of unfinished messages are more than ",
                    options_.most_unfinished_bytes, ": closing the connection with ",
                    largest->second.unfinished(), " of them"));
  Close(largest->second);
  series_.dropped_unfinished->Increment();
}

// The allocator keeps freed memory for the next burst. A server that shares its machine should
// return it.
void AcceptingListener::GiveBackMemory() {
  if (!trim_at_.has_value() || SteadyClock::now() < *trim_at_) return;
  malloc_trim(0);
  trim_at_.reset();
  if (--trims_left_ > 0) trim_at_ = SteadyClock::now() + kTrimInterval;
}

// --- connections --------------------------------------------------------------------------------

// The end of a connection is always reported. Bytes of a busy one are not, because this thread
// would be woken for every packet.
void AcceptingListener::Watch(uint64_t id, const Connection& connection, Interest interest,
                              int operation) {
  epoll_event event = {.events = EPOLLET, .data = {.u64 = id}};
  if (interest == Interest::kBytes) event.events |= EPOLLIN;
  epoll_ctl(epoll_.get(), operation, connection.socket.get(), &event);
}

void AcceptingListener::Close(Connection& connection) {
  connection.closing = true;
  ++closing_;
  unfinished_ -= connection.unfinished();
  connection.accounted = connection.received;
  shutdown(connection.socket.get(), SHUT_RDWR);
}

void AcceptingListener::Remove(Connections::iterator connection) {
  if (connection->second.closing) --closing_;
  unfinished_ -= connection->second.unfinished();
  const auto named = by_peer_.find(connection->second.peer);
  if (named != by_peer_.end() && named->second == connection->first) by_peer_.erase(named);
  connections_.erase(connection);
  series_.open->Set(static_cast<double>(connections_.size()));
}

Connection* AcceptingListener::Find(const std::string& peer) {
  const auto named = by_peer_.find(Normalized(peer));
  if (named == by_peer_.end()) return nullptr;
  return &connections_.at(named->second);
}

std::unique_ptr<GrpcListener::Call> AcceptingListener::BeginCall(const std::string& peer) {
  MutexLock lock(mu_);
  const auto named = by_peer_.find(Normalized(peer));
  if (named == by_peer_.end()) return nullptr;
  ++connections_.at(named->second).calls;
  return std::make_unique<LiveCall>(*this, named->second);
}

void AcceptingListener::EndCall(uint64_t connection) {
  MutexLock lock(mu_);
  const auto found = connections_.find(connection);
  if (found != connections_.end()) --found->second.calls;
}

void AcceptingListener::OnMessage(const std::string& peer, size_t bytes) {
  MutexLock lock(mu_);
  Connection* connection = Find(peer);
  if (connection == nullptr) return;
  Sample(*connection, SteadyClock::now());
  unfinished_ -= connection->unfinished();
  connection->accounted =
      std::min(connection->received, connection->accounted + bytes + kBytesAroundMessage);
  unfinished_ += connection->unfinished();
}

void AcceptingListener::Warn(const std::string& text) {
  const SteadyClock::time_point now = SteadyClock::now();
  if (now - logged_at_ < kLogInterval) return;
  logged_at_ = now;
  spdlog::warn("{}: {}", options_.address, text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcListener>> GrpcListener::Listen(GrpcListenerOptions options) {
  auto listener = std::make_unique<AcceptingListener>(std::move(options));
  KVASIR_RETURN_IF_ERROR(listener->Open());
  return std::unique_ptr<GrpcListener>(std::move(listener));
}

}  // namespace kvasir::proto
