#include "coordinator/http/http_front.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "coordinator/http/context_calls.h"
#include "coordinator/http/http_call.h"
#include "coordinator/http/metrics_call.h"
#include "coordinator/http/selections_call.h"
#include "coordinator/http/server_calls.h"
#include "coordinator/http/status/status_feed.h"
#include "coordinator/http/status/status_page.h"
#include "coordinator/http/text_calls.h"
#include "coordinator/http/tokenizer_info.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/http_server.h"
#include "coordinator/request/request_log.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/request/status_json.h"
#include "coordinator/time/clock.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Call = void (*)(const HttpCallContext&, std::shared_ptr<Exchange>);

struct Route {
  absl::string_view method;
  absl::string_view path;
  Call call;
};

constexpr absl::string_view kModelsPrefix = "/v1/models/";
constexpr absl::string_view kMetrics = "/metrics";
constexpr absl::string_view kStatusPage = "/";
constexpr absl::string_view kStatusEvents = "/status/events";
// The page lists so many requests.
constexpr uint32_t kListedRequests = 100;

constexpr Route kRoutes[] = {
    {"GET", "/health", GetHealth},
    {"GET", "/ping", GetHealth},
    {"GET", "/version", GetVersion},
    {"GET", "/load", GetLoad},
    {"GET", "/tokenizer_info", GetTokenizerInfo},
    {"GET", "/v1/models", GetModels},
    {"POST", "/v1/chat/completions", PostChatCompletions},
    {"POST", "/v1/completions", PostCompletions},
    {"POST", "/tokenize", PostTokenize},
    {"POST", "/detokenize", PostDetokenize},
    {"POST", "/status/selections", PostSelections},
};

void LogHttpRefusal(GenerationApi& api, const HttpRefusal& refusal) {
  const HttpRequest& request = refusal.request;
  const RequestOrigin origin = OriginOf(
      {},
      {.caller = refusal.caller,
       .request_id = request.request_id,
       .traceparent = request.traceparent},
      [&api] { return api.NewRequestId(); }, request.arrived);
  LogRefusal(origin, refusal.why);
}

class RoutedFront final : public HttpFront {
 public:
  explicit RoutedFront(HttpFrontOptions options)
      : context_{.api = options.api,
                 .contexts = options.contexts,
                 .health = std::move(options.health),
                 .model = std::move(options.model),
                 .tokenizer_info = TokenizerInfo(options.tokenizer_config, options.chat_template),
                 .started = absl::Now()},
        metrics_(options.registry),
        status_([this] { return Status(); }, clock_) {}

  ~RoutedFront() override {
    if (server_ != nullptr) server_->Stop(absl::ZeroDuration());
  }

  absl::Status Listen(const HttpFrontOptions& options) {
    KVASIR_ASSIGN_OR_RETURN(
        server_,
        HttpServer::Start(
            {.host = options.host,
             .port = options.port,
             .registry = &options.registry,
             .handler = [this](std::shared_ptr<Exchange> exchange) { Handle(std::move(exchange)); },
             .new_request_id = [this] { return context_.api.NewRequestId(); },
             .on_refusal =
                 [this](const HttpRefusal& refusal) { LogHttpRefusal(context_.api, refusal); },
             .client_timeout = options.client_timeout,
             .tls = options.tls}));
    return absl::OkStatus();
  }

  int port() const override { return server_->port(); }
  void Stop(absl::Duration grace) override {
    status_.Stop();
    server_->Stop(grace);
  }

 private:
  void Handle(std::shared_ptr<Exchange> exchange) {
    const std::string& path = exchange->request().path;
    // Probes have no key, and the status page asks for one.
    if (path != "/health" && path != "/ping" && path != kStatusPage) {
      absl::StatusOr<std::shared_ptr<const Caller>> caller =
          context_.api.Authenticate(exchange->request().authorization);
      if (!caller.ok()) return exchange->Refuse(caller.status());
      exchange->set_caller(*std::move(caller));
    }
    if (IsContextPath(path)) return ServeContexts(context_, std::move(exchange));
    // HEAD is answered as GET, and the connection leaves out the body. A stream is nothing else.
    const std::string& asked = exchange->request().method;
    const std::string method = asked == "HEAD" && path != kStatusEvents ? "GET" : asked;
    absl::string_view served;  // method of the path
    for (const Route& route : kRoutes) {
      if (route.path != path) continue;
      if (route.method == method) return route.call(context_, std::move(exchange));
      served = route.method;
    }
    if (IsOwn(path)) {
      if (method == "GET") return GetOwn(path, std::move(exchange));
      served = "GET";
    }
    if (served.empty()) {
      return exchange->Refuse(absl::NotFoundError(
          absl::StrCat("there is no ", path, "; docs/api.md lists what there is")));
    }
    const absl::string_view allow = served == "GET" && path != kStatusEvents ? "GET, HEAD" : served;
    exchange->Refuse(
        WithAllowedMethods(absl::InvalidArgumentError(absl::StrCat(path, " is not served for ",
                                                                   asked, ", only for ", allow)),
                           allow));
  }

  // Calls that keep something of their own, or take a part of the path.
  static bool IsOwn(absl::string_view path) {
    return path == kMetrics || path == kStatusPage || path == kStatusEvents ||
           absl::StartsWith(path, kModelsPrefix);
  }
  void GetOwn(const std::string& path, std::shared_ptr<Exchange> exchange) {
    if (path == kMetrics) return metrics_.Answer(std::move(exchange));
    if (path == kStatusPage) return page_.Answer(*exchange);
    if (path == kStatusEvents) return status_.Listen(std::move(exchange));
    GetModel(context_, path.substr(kModelsPrefix.size()), std::move(exchange));
  }
  // Returns the data of an event of the status page.
  std::string Status() const {
    v1::GetServerInfoRequest asked;
    asked.set_max_requests(kListedRequests);
    const absl::StatusOr<v1::GetModelInfoResponse> model = context_.api.ModelInfo();
    const absl::StatusOr<std::string> told =
        StatusJson(context_.api.ServerInfo(asked), model.ok() ? &*model : nullptr);
    return told.ok() ? *told : ErrorJson(told.status());
  }

  const HttpCallContext context_;
  const StatusPage page_;
  SteadyClock clock_;
  std::unique_ptr<HttpServer> server_;
  // These keep connections of the server.
  MetricsCall metrics_;
  StatusFeed status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpFront>> HttpFront::Start(HttpFrontOptions options) {
  auto front = std::make_unique<RoutedFront>(options);
  KVASIR_RETURN_IF_ERROR(front->Listen(options));
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace kvasir::coordinator
