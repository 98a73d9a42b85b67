#include "proto/metrics_endpoint.h"

#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/text_serializer.h"

#include "httplib.h"

namespace kvasir::proto {
namespace {

class HttpMetricsEndpoint : public MetricsEndpoint {
 public:
  explicit HttpMetricsEndpoint(MetricsEndpointOptions options) : options_(std::move(options)) {}
  ~HttpMetricsEndpoint() override {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Listen() {
    server_.new_task_queue = [] { return new httplib::ThreadPool(2); };
    // The library's default is SO_REUSEPORT, with which a port in use would be shared silently.
    server_.set_socket_options([](socket_t socket) {
      const int on = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    });
    server_.set_payload_max_length(0);  // nothing is posted here
    server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      std::ostringstream text;
      prometheus::TextSerializer().Serialize(text, options_.registry->Collect());
      response.set_content(text.str(), "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.Get("/health", [this](const httplib::Request&, httplib::Response& response) {
      const absl::Status health = options_.health();
      response.status = health.ok() ? 200 : 503;
      response.set_content(health.ok() ? "ok\n" : absl::StrCat(health.message(), "\n"),
                           "text/plain");
    });
    port_ = options_.port != 0 ? options_.port : server_.bind_to_any_port(options_.host.c_str());
    const bool bound =
        options_.port == 0 ? port_ > 0 : server_.bind_to_port(options_.host.c_str(), port_);
    if (!bound) {
      return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ", options_.host, ":",
                                                 options_.port, "; choose another --metrics-port"));
    }
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    // stop() before the accept loop runs would be forgotten.
    while (!server_.is_running()) std::this_thread::yield();
    return absl::OkStatus();
  }

  int port() const override { return port_; }

 private:
  const MetricsEndpointOptions options_;
  int port_ = 0;
  httplib::Server server_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(
    MetricsEndpointOptions options) {
  auto endpoint = std::make_unique<HttpMetricsEndpoint>(std::move(options));
  if (absl::Status status = endpoint->Listen(); !status.ok()) return status;
  return std::unique_ptr<MetricsEndpoint>(std::move(endpoint));
}

}  // namespace kvasir::proto
