#include "coordinator/http/http_front.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "coordinator/http/http_call.h"
#include "coordinator/http/metrics_call.h"
#include "coordinator/http/server_calls.h"
#include "coordinator/http/text_calls.h"
#include "coordinator/http/tokenizer_info.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/http_server.h"
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
};

class RoutedFront final : public HttpFront {
 public:
  RoutedFront(HttpFrontOptions options, nlohmann::json tokenizer_info)
      : context_{.api = options.api,
                 .health = std::move(options.health),
                 .model = std::move(options.model),
                 .tokenizer_info = std::move(tokenizer_info),
                 .started = absl::Now()},
        metrics_(options.registry) {}

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
             .client_timeout = options.client_timeout}));
    return absl::OkStatus();
  }

  int port() const override { return server_->port(); }
  void Stop(absl::Duration grace) override { server_->Stop(grace); }

 private:
  void Handle(std::shared_ptr<Exchange> exchange) {
    const std::string& path = exchange->request().path;
    const std::string& method = exchange->request().method;
    std::string allow;
    for (const Route& route : kRoutes) {
      if (route.path != path) continue;
      if (route.method == method) return route.call(context_, std::move(exchange));
      absl::StrAppend(&allow, allow.empty() ? "" : ", ", route.method);
    }
    if (path == kMetrics || absl::StartsWith(path, kModelsPrefix)) {
      if (method != "GET") {
        allow = "GET";
      } else if (path == kMetrics) {
        return metrics_.Answer(std::move(exchange));
      } else {
        const std::string model = path.substr(kModelsPrefix.size());
        return GetModel(context_, model, std::move(exchange));
      }
    }
    if (allow.empty()) {
      return exchange->Reply(ErrorReply(absl::NotFoundError(
          absl::StrCat("there is no ", path, "; docs/api.md lists what there is"))));
    }
    HttpReply reply = ErrorReply(absl::InvalidArgumentError(
        absl::StrCat(path, " is not served for ", method, ", only for ", allow)));
    reply.status = 405;
    reply.allow = allow;
    exchange->Reply(std::move(reply));
  }

  const HttpCallContext context_;
  std::unique_ptr<HttpServer> server_;
  MetricsCall metrics_;  // keeps connections of the server
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpFront>> HttpFront::Start(HttpFrontOptions options) {
  KVASIR_ASSIGN_OR_RETURN(nlohmann::json tokenizer_info, LoadTokenizerInfo(options.model_folder));
  auto front = std::make_unique<RoutedFront>(options, std::move(tokenizer_info));
  KVASIR_RETURN_IF_ERROR(front->Listen(options));
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace kvasir::coordinator
