#include "coordinator/http/transport/http_server.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "spdlog/spdlog.h"

#include "boost/asio/executor_work_guard.hpp"
#include "boost/asio/io_context.hpp"
#include "boost/asio/post.hpp"
#include "boost/asio/strand.hpp"
#include "coordinator/http/transport/body_budget.h"
#include "coordinator/http/transport/connection.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/process/named_thread.h"
#include "proto/sockets.h"

namespace kvasir::coordinator {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using kernels::MutexLock;
using ErrorCode = boost::system::error_code;

constexpr int kThreads = 2;
constexpr size_t kMostConnections = 4096;
constexpr size_t kDescriptorsPerConnection = 4;
constexpr size_t kMostArrivingBytes = size_t{256} << 20;
// Bytes that the kernel holds of an answer that is not read.
constexpr int kSendBufferBytes = 256 << 10;
// Pause of accepting when the process has no descriptor left.
constexpr std::chrono::milliseconds kAcceptPause(100);

size_t ConnectionsFor(size_t most) {
  if (most > 0) return most;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return std::clamp<size_t>(limit.rlim_cur / kDescriptorsPerConnection, 1, kMostConnections);
}

tcp FamilyOf(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return address.ss_family == AF_INET6 ? tcp::v6() : tcp::v4();
}

void SetOptions(tcp::socket& socket) {
  ErrorCode ignored;
  socket.set_option(tcp::no_delay(true), ignored);  // tokens are sent as they come
  socket.set_option(asio::socket_base::send_buffer_size(kSendBufferBytes), ignored);
}

struct Series {
  explicit Series(prometheus::Registry& registry)
      : open(&prometheus::BuildGauge()
                  .Name("kvasir_http_connections")
                  .Help("Open connections of the HTTP port.")
                  .Register(registry)
                  .Add({})),
        refused(&prometheus::BuildCounter()
                     .Name("kvasir_http_connections_refused_total")
                     .Help("New connections of the HTTP port that were closed at once, because "
                           "all others were being answered.")
                     .Register(registry)
                     .Add({})),
        answers(&prometheus::BuildCounter()
                     .Name("kvasir_http_answers_total")
                     .Help("Answers of the HTTP port by status code; a stream counts when it "
                           "begins.")
                     .Register(registry)) {
    for (const int status : {200, 400, 404, 429, 500, 503}) Answer(status);
  }
  prometheus::Counter& Answer(int status) const {
    return answers->Add({{"code", absl::StrCat(status)}});
  }

  prometheus::Gauge* open;
  prometheus::Counter* refused;
  prometheus::Family<prometheus::Counter>* answers;
};

class AsioServer final : public HttpServer {
 public:
  explicit AsioServer(HttpServerOptions options)
      : options_(std::move(options)),
        most_connections_(ConnectionsFor(options_.most_connections)),
        series_(*options_.registry),
        budget_(kMostArrivingBytes),
        warnings_("HTTP port"),
        context_{.handler = options_.handler,
                 .budget = budget_,
                 .client_timeout = options_.client_timeout,
                 .most_body_bytes = options_.most_body_bytes,
                 .on_closed = [this](uint64_t id) { OnClosed(id); },
                 .new_request_id = options_.new_request_id,
                 .on_refusal = options_.on_refusal,
                 .on_answer = [this](int status) { series_.Answer(status).Increment(); },
                 .tls = options_.tls.get(),
                 .warnings = warnings_} {}
  ~AsioServer() override { Stop(absl::ZeroDuration()); }

  absl::Status Listen();
  int port() const override { return port_; }
  void Stop(absl::Duration grace) override EXCLUDES(mu_);

 private:
  struct Acceptor {
    tcp::acceptor acceptor;
    asio::steady_timer pause;
  };

  void Accept(Acceptor& acceptor);
  void OnAccept(Acceptor& acceptor, const ErrorCode& error, tcp::socket socket) EXCLUDES(mu_);
  // Makes the oldest connection that is not being answered give way; false when there is none.
  bool MakeRoom() REQUIRES(mu_);
  void OnClosed(uint64_t id) EXCLUDES(mu_);

  const HttpServerOptions options_;
  const size_t most_connections_;
  const Series series_;
  BodyBudget budget_;
  proto::RareWarnings warnings_;
  const ConnectionContext context_;
  int port_ = 0;

  asio::io_context io_;
  std::vector<std::unique_ptr<Acceptor>> acceptors_;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::map<uint64_t, std::shared_ptr<Connection>> connections_ GUARDED_BY(mu_);  // by age
  uint64_t next_id_ GUARDED_BY(mu_) = 0;
  bool stopping_ GUARDED_BY(mu_) = false;

  std::vector<std::thread> threads_;
};

absl::Status AsioServer::Listen() {
  absl::StatusOr<proto::ListeningSockets> listening =
      proto::ListenOn(absl::StrCat(options_.host, ":", options_.port));
  if (!listening.ok()) {
    return absl::UnavailableError(absl::StrCat("HTTP: ", listening.status().message(),
                                               "; choose another --http-port, or 0 for any free "
                                               "one"));
  }
  port_ = listening->port;
  work_.emplace(io_.get_executor());
  for (proto::Descriptor& socket : listening->sockets) {
    acceptors_.push_back(std::make_unique<Acceptor>(Acceptor{
        .acceptor = tcp::acceptor(asio::make_strand(io_)), .pause = asio::steady_timer(io_)}));
    ErrorCode error;
    const tcp family = FamilyOf(socket.get());
    acceptors_.back()->acceptor.assign(family, socket.Release(), error);
    if (error) return absl::InternalError(absl::StrCat("HTTP: ", error.message()));
    Accept(*acceptors_.back());
  }
  for (int i = 0; i < kThreads; ++i)
    threads_.push_back(proto::NamedThread("http", [this] { io_.run(); }));
  return absl::OkStatus();
}

void AsioServer::Accept(Acceptor& acceptor) {
  acceptor.acceptor.async_accept(asio::make_strand(io_),
                                 [this, &acceptor](const ErrorCode& error, tcp::socket socket) {
                                   OnAccept(acceptor, error, std::move(socket));
                                 });
}

void AsioServer::OnAccept(Acceptor& acceptor, const ErrorCode& error, tcp::socket socket) {
  if (error == asio::error::operation_aborted) return;
  std::shared_ptr<Connection> admitted;
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    if (error) {
      // Most likely the process has no descriptor left.
      MakeRoom();
    } else if (connections_.size() >= most_connections_ && !MakeRoom()) {
      series_.refused->Increment();
    } else {
      SetOptions(socket);
      admitted = std::make_shared<Connection>(std::move(socket), next_id_, context_);
      connections_.emplace(next_id_++, admitted);
      series_.open->Set(static_cast<double>(connections_.size()));
    }
  }
  if (error) {
    acceptor.pause.expires_after(kAcceptPause);
    return acceptor.pause.async_wait([this, &acceptor](const ErrorCode& aborted) {
      if (!aborted) Accept(acceptor);
    });
  }
  if (admitted != nullptr) admitted->Start();
  Accept(acceptor);
}

bool AsioServer::MakeRoom() {
  for (auto it = connections_.begin(); it != connections_.end(); ++it) {
    if (!it->second->GiveWay()) continue;
    connections_.erase(it);
    return true;
  }
  return false;
}

void AsioServer::OnClosed(uint64_t id) {
  MutexLock lock(mu_);
  connections_.erase(id);
  series_.open->Set(static_cast<double>(connections_.size()));
  changed_.NotifyAll();
}

void AsioServer::Stop(absl::Duration grace) {
  std::vector<std::shared_ptr<Connection>> open;
  {
    MutexLock lock(mu_);
    if (std::exchange(stopping_, true)) return;
    for (const auto& [id, connection] : connections_) open.push_back(connection);
  }
  for (const std::unique_ptr<Acceptor>& acceptor : acceptors_) {
    asio::post(acceptor->acceptor.get_executor(), [&acceptor] {
      ErrorCode ignored;
      acceptor->acceptor.close(ignored);
    });
  }
  for (const std::shared_ptr<Connection>& connection : open) connection->Stop();
  open.clear();
  {
    MutexLock lock(mu_);
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(grace);
    while (!connections_.empty() && std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(mu_, deadline);
    }
  }
  work_.reset();
  io_.stop();
  for (std::thread& thread : threads_) thread.join();
  acceptors_.clear();
  MutexLock lock(mu_);
  connections_.clear();
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpServerOptions options) {
  auto server = std::make_unique<AsioServer>(std::move(options));
  KVASIR_RETURN_IF_ERROR(server->Listen());
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace kvasir::coordinator
