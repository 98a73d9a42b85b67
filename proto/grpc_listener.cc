#include "proto/grpc_listener.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <linux/tcp.h>
#include <malloc.h>
#include <netinet/in.h>
#include <optional>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/server_credentials.h"
#include "prometheus/counter.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/connection_table.h"
#include "proto/process/named_thread.h"
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
// Interval of counting while bytes come: at 1 GB/s the count is off by at most 20 MB.
constexpr milliseconds kTick(20);
// Interval of checking, while new connections are refused, whether that is over.
constexpr seconds kRefusalCheck(1);
// gRPC releases a closed connection's memory in its own time, later on a busy machine.
constexpr seconds kTrimInterval(1);
constexpr int kTrims = 5;
// Unacknowledged bytes and probes end a connection after this time. Milliseconds.
constexpr int kUserTimeoutMs = 20'000;
// Interval of the kernel's probes of a silent connection. When the other end gave the connection up
// while the network was cut, its words to say so are lost, and this end would wait for it for ever.
constexpr int kProbeSeconds = 1;

int64_t ConnectionsFor(int64_t most) {
  if (most > 0) return most;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto descriptors = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1u << 30));
  return std::clamp<int64_t>(descriptors / kDescriptorsPerConnection, 1, kMostConnections);
}

// Bounds how long a connection outlives its other end. Accepted sockets inherit this.
void BoundSilence(int listening_socket) {
  const auto set = [listening_socket](int level, int option, int value) {
    setsockopt(listening_socket, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kProbeSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

absl::Status TooManyFiles() {
  return absl::UnavailableError("the process has as many open files as it may; raise ulimit -n");
}

struct Series {
  explicit Series(prometheus::Registry& registry) {
    auto& refused = prometheus::BuildCounter()
                        .Name("kvasir_connections_refused_total")
                        .Help("New connections of the gRPC port that were closed at once.")
                        .Register(registry);
    refused_full = &refused.Add({{"reason", "full"}});
    refused_descriptors = &refused.Add({{"reason", "descriptors"}});
  }

  prometheus::Counter* refused_full;
  prometheus::Counter* refused_descriptors;
};

class AcceptingListener final : public GrpcListener {
 public:
  explicit AcceptingListener(GrpcListenerOptions options)
      : options_(std::move(options)),
        most_connections_(ConnectionsFor(options_.most_connections)),
        series_(*options_.registry),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        connections_(options_, most_connections_, epoll_.get()) {}
  ~AcceptingListener() override { Stop(); }

  absl::Status Open();

  int port() const override { return listening_.port; }
  void AddTo(grpc::ServerBuilder& builder) override;
  void Start() override {
    thread_ = NamedThread("grpc-port", [this] { Run(); });
  }
  void Stop() override;
  absl::Status status() const override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return status_;
  }
  std::unique_ptr<Call> BeginCall(const std::string& peer) override {
    return connections_.BeginCall(peer);
  }
  void OnMessage(const std::string& peer, size_t bytes) override {
    connections_.OnMessage(peer, bytes);
  }

 private:
  // The listener's thread.
  void Run() EXCLUDES(mu_);
  int WaitMs() const;
  void AcceptAll();
  // Returns false when the rest must wait: too many connections are about to close.
  bool AcceptFrom(int listening_socket);
  enum class Refused { kOne, kNobodyWaits, kNoDescriptor };
  Refused RefuseForDescriptors(int listening_socket) EXCLUDES(mu_);
  void Admit(Descriptor socket) EXCLUDES(mu_);
  void Refuse(prometheus::Counter& counter, const absl::Status& why) EXCLUDES(mu_);
  void LookWhetherRefusing() EXCLUDES(mu_);
  void SetStatus(const absl::Status& status) EXCLUDES(mu_);
  void OnEvent(uint64_t id, uint32_t events);
  void GiveBackMemory();

  const GrpcListenerOptions options_;
  const int64_t most_connections_;
  Series series_;
  ListeningSockets listening_;
  const Descriptor epoll_;
  Descriptor wake_;
  Descriptor spare_;  // closed for a moment to accept, and refuse, a connection when none is free
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_;
  ConnectionTable connections_;

  // The listener's thread.
  bool stopping_ = false;
  bool backlog_ = false;  // connections may wait to be accepted
  std::optional<SteadyClock::time_point> trim_at_;
  int trims_left_ = 0;
  std::optional<SteadyClock::time_point> refused_at_;  // last refusal; set while status_ is bad

  mutable kernels::Mutex mu_;
  absl::Status status_ GUARDED_BY(mu_);

  std::thread thread_;  // last: it uses everything above
};

// Ids for epoll events of other descriptors than connections; connection ids count up from 0.
constexpr uint64_t kWakeId = ~uint64_t{0};
constexpr uint64_t kFirstListeningId = kWakeId - 64;

absl::Status AcceptingListener::Open() {
  KVASIR_ASSIGN_OR_RETURN(listening_, ListenOn(options_.address));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto add = [this](int socket, uint64_t id) {
    epoll_event event = {.events = EPOLLIN | EPOLLET, .data = {.u64 = id}};
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) == 0;
  };
  bool added = add(wake_.get(), kWakeId);
  for (size_t i = 0; i < listening_.sockets.size(); ++i) {
    const int socket = listening_.sockets[i].get();
    if (listening_.port != 0) BoundSilence(socket);
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
  const bool is_plain = options_.tls == nullptr || IsUnixAddress(options_.address);
  grpc_ = builder.experimental().AddExternalConnectionAcceptor(
      Experimental::ExternalConnectionType::FROM_FD,
      is_plain ? grpc::InsecureServerCredentials() : options_.tls->GrpcCredentials());
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
    if (connections_.AnyBusy()) connections_.CountBytes();
    if (connections_.BurstIsOver()) {
      trim_at_ = SteadyClock::now() + kTrimInterval;
      trims_left_ = kTrims;
    }
    GiveBackMemory();
    if (refused_at_.has_value() && SteadyClock::now() - *refused_at_ >= kRefusalCheck) {
      LookWhetherRefusing();
    }
  }
}

int AcceptingListener::WaitMs() const {
  if (backlog_ || connections_.AnyBusy()) return static_cast<int>(kTick.count());
  if (trim_at_.has_value() || refused_at_.has_value() || connections_.InBurst()) {
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
    connections_.OnEvent(id, events);
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
    if (connections_.ManyAreClosing()) return false;
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
  if (!ours.valid()) return Refuse(*series_.refused_descriptors, TooManyFiles());
  if (!connections_.Add(std::move(ours))) {
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

void AcceptingListener::Refuse(prometheus::Counter& counter, const absl::Status& why) {
  counter.Increment();
  refused_at_ = SteadyClock::now();
  SetStatus(why);
}

void AcceptingListener::LookWhetherRefusing() {
  if (!spare_.valid()) spare_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Descriptor another(fcntl(wake_.get(), F_DUPFD_CLOEXEC, 0));
  if (connections_.Full() || !spare_.valid() || !another.valid()) return;
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

// glibc's allocator, a worker's, keeps freed memory for the next burst. A server that shares its
// machine should return it. The coordinator's allocator does so by itself.
void AcceptingListener::GiveBackMemory() {
  if (!trim_at_.has_value() || SteadyClock::now() < *trim_at_) return;
  malloc_trim(0);
  trim_at_.reset();
  if (--trims_left_ > 0) trim_at_ = SteadyClock::now() + kTrimInterval;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcListener>> GrpcListener::Listen(GrpcListenerOptions options) {
  auto listener = std::make_unique<AcceptingListener>(std::move(options));
  KVASIR_RETURN_IF_ERROR(listener->Open());
  return std::unique_ptr<GrpcListener>(std::move(listener));
}

}  // namespace kvasir::proto
