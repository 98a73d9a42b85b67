#include "proto/metrics_endpoint.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <list>
#include <memory>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"
#include "proto/metrics_text.h"
#include "proto/process/named_thread.h"
#include "proto/process/rare_warnings.h"
#include "proto/security/tls_socket.h"
#include "proto/sockets.h"

namespace kvasir::proto {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kMostConnections = 64;
constexpr size_t kMostRequestBytes = 8192;
constexpr seconds kRequestTime(5);
constexpr seconds kResponseTime(10);
// Pause of accepting: without a free descriptor a waiting connection would wake the thread for
// ever.
constexpr milliseconds kAcceptPause(100);

std::string Response(absl::string_view status, absl::string_view type, absl::string_view body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n", body);
}

std::string TextResponse(absl::string_view status, absl::string_view body) {
  return Response(status, "text/plain", body);
}

struct Connection {
  TlsSocket socket;
  SteadyClock::time_point deadline;
  std::string request = {};
  bool asks_for_head = false;  // by HEAD: the answer of GET without its body
  int64_t awaited_text = 0;    // 0: none
  std::shared_ptr<const std::string> response = nullptr;
  size_t sent = 0;
  bool answered = false;  // the response is sent; anything the client still sends is discarded

  bool writes() const { return response != nullptr && !answered; }
  void Respond(std::string text) {
    if (asks_for_head) text.resize(text.find("\r\n\r\n") + 4);
    response = std::make_shared<const std::string>(std::move(text));
  }
};

class PollingEndpoint final : public MetricsEndpoint {
 public:
  explicit PollingEndpoint(MetricsEndpointOptions options)
      : options_(std::move(options)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        text_(*options_.registry, [this] { eventfd_write(wake_.get(), 1); }),
        warnings_("metrics port") {}
  ~PollingEndpoint() override {
    stopping_ = true;
    eventfd_write(wake_.get(), 1);
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Listen() {
    const std::string address = absl::StrCat(options_.host, ":", options_.port);
    absl::StatusOr<ListeningSockets> listening = ListenOn(address);
    if (!listening.ok()) {
      return absl::UnavailableError(absl::StrCat("metrics: ", listening.status().message(),
                                                 "; choose another --metrics-port"));
    }
    listening_ = *std::move(listening);
    thread_ = NamedThread("metrics-port", [this] { Run(); });
    return absl::OkStatus();
  }

  int port() const override { return listening_.port; }

 private:
  void Run() {
    while (!stopping_) {
      const std::vector<pollfd> ready = Poll();
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
      const SteadyClock::time_point now = SteadyClock::now();
      auto connection = connections_.begin();
      for (size_t i = 1 + listening_.sockets.size(); i < ready.size(); ++i) {
        const bool goes_on = Serve(*connection, ready[i].revents, now);
        connection = goes_on ? std::next(connection) : connections_.erase(connection);
      }
      for (size_t i = 0; i < listening_.sockets.size(); ++i) {
        if ((ready[1 + i].revents & POLLIN) != 0) AcceptOne(listening_.sockets[i].get(), now);
      }
    }
  }

  // Polls the wake-up, the listening sockets and the connections, in this order.
  std::vector<pollfd> Poll() {
    std::vector<pollfd> waited = {{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    const SteadyClock::time_point now = SteadyClock::now();
    SteadyClock::time_point next = now + std::chrono::hours(1);
    for (const Descriptor& socket : listening_.sockets) {
      const bool paused = now < accepts_from_;
      if (paused) next = std::min(next, accepts_from_);
      waited.push_back({.fd = paused ? -1 : socket.get(), .events = POLLIN, .revents = 0});
    }
    for (const Connection& connection : connections_) {
      const bool idle = connection.awaited_text != 0 && connection.response == nullptr;
      const auto events = idle ? short{0} : connection.socket.waits_for();
      waited.push_back({.fd = connection.socket.get(), .events = events, .revents = 0});
      next = std::min(next, connection.deadline);
    }
    const auto patience = std::chrono::ceil<milliseconds>(next - now).count();
    poll(waited.data(), waited.size(), static_cast<int>(std::max<int64_t>(0, patience)));
    return waited;
  }

  // REQUIRES: a connection waits. Without one accept would report a lack of descriptors too.
  void AcceptOne(int listening_socket, SteadyClock::time_point now) {
    Descriptor socket(accept4(listening_socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      if (connections_.size() >= kMostConnections) connections_.pop_front();
      const auto context = options_.tls == nullptr ? nullptr : options_.tls->Context();
      connections_.push_back(
          {.socket = TlsSocket(std::move(socket), context), .deadline = now + kRequestTime});
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      if (!connections_.empty()) connections_.pop_front();
      accepts_from_ = now + kAcceptPause;
    }
  }

  // Returns false when the connection has ended.
  bool Serve(Connection& connection, short events, SteadyClock::time_point now) {
    if (now >= connection.deadline || (events & (POLLERR | POLLNVAL)) != 0) return false;
    if (connection.awaited_text != 0 && connection.response == nullptr) {
      const std::shared_ptr<const std::string> text = text_.Get(connection.awaited_text);
      if (text != nullptr) {
        connection.Respond(Response("200 OK", MetricsText::kContentType, *text));
      }
    }
    if (connection.writes()) return Write(connection);
    if ((events & (POLLIN | POLLOUT | POLLHUP)) != 0) return Read(connection, now);
    return true;
  }

  bool Read(Connection& connection, SteadyClock::time_point now) {
    char bytes[2048];
    // A TLS connection may hold bytes that poll does not see: they are read until there are none.
    while (true) {
      size_t count = 0;
      const TlsSocket::Result result = connection.socket.Read(bytes, sizeof(bytes), count);
      if (result == TlsSocket::Result::kAgain) return true;
      if (result == TlsSocket::Result::kEnded) {
        if (!connection.socket.failure().empty()) warnings_.Warn(connection.socket.failure());
        return false;
      }
      if (connection.answered || connection.awaited_text != 0) return true;
      connection.request.append(bytes, count);
      const bool complete = connection.request.find("\r\n\r\n") != std::string::npos;
      if (!complete && !IsMistaken(connection) && connection.request.size() <= kMostRequestBytes) {
        continue;
      }
      connection.deadline = now + kResponseTime;
      Answer(connection, complete);
      return !connection.writes() || Write(connection);
    }
  }

  // Whether the client speaks TLS to a plain port or the reverse.
  static bool IsMistaken(const Connection& connection) {
    return connection.socket.is_plain_by_mistake() || BeginsTls(connection.request.front());
  }

  void Answer(Connection& connection, bool complete) {
    const std::string line = connection.request.substr(0, connection.request.find("\r\n"));
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    const auto say = [&](absl::string_view status, absl::string_view body) {
      connection.Respond(TextResponse(status, body));
    };
    if (IsMistaken(connection)) {
      const bool speaks_tls = options_.tls != nullptr;
      warnings_.Warn(speaks_tls ? "a client speaks without TLS, and this port speaks TLS"
                                : "a client speaks TLS, and this port has no --tls-cert-file");
      return say("400 Bad Request", speaks_tls ? "this port speaks TLS; use https://\n"
                                               : "this port speaks no TLS; use http://\n");
    }
    if (!complete || words.size() != 3) return say("400 Bad Request", "not an HTTP request\n");
    connection.asks_for_head = words[0] == "HEAD";
    if (words[0] != "GET" && !connection.asks_for_head) {
      return say("405 Method Not Allowed", "only GET and HEAD are served here\n");
    }
    const absl::string_view path = words[1].substr(0, words[1].find('?'));
    if (path == "/metrics") {
      connection.awaited_text = text_.Ask();
    } else if (path == "/health") {
      const absl::Status health = options_.health();
      say(health.ok() ? "200 OK" : "503 Service Unavailable",
          health.ok() ? "ok\n" : absl::StrCat(health.message(), "\n"));
    } else {
      say("404 Not Found", "there are /metrics and /health\n");
    }
  }

  static bool Write(Connection& connection) {
    const std::string& response = *connection.response;
    size_t count = 0;
    const TlsSocket::Result result = connection.socket.Write(
        response.data() + connection.sent, response.size() - connection.sent, count);
    if (result != TlsSocket::Result::kDone) return result == TlsSocket::Result::kAgain;
    connection.sent += count;
    if (connection.sent == response.size()) {
      connection.answered = true;
      connection.socket.EndWriting();  // closed once the client has, or at its deadline
    }
    return true;
  }

  const MetricsEndpointOptions options_;
  ListeningSockets listening_;
  const Descriptor wake_;
  MetricsText text_;
  RareWarnings warnings_;
  std::atomic<bool> stopping_ = false;

  // Used only by the thread.
  std::list<Connection> connections_;  // oldest first
  SteadyClock::time_point accepts_from_ = {};

  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(
    MetricsEndpointOptions options) {
  auto endpoint = std::make_unique<PollingEndpoint>(std::move(options));
  KVASIR_RETURN_IF_ERROR(endpoint->Listen());
  return std::unique_ptr<MetricsEndpoint>(std::move(endpoint));
}

}  // namespace kvasir::proto
