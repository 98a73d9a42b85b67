// The HTTP API: OpenAI's, and ours, over the same GenerationApi as gRPC. It hides routes, JSON and
// events. Made by the server. Thread-safe; Stop is called by one thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "prometheus/registry.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/request/generation_api.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

struct HttpFrontOptions {
  GenerationApi& api;  // outlives the front, as the contexts do
  Contexts& contexts;
  std::string host;
  int port = 0;                          // 0: any free one
  prometheus::Registry& registry;        // outlives the front
  std::function<absl::Status()> health;  // OK: requests are served. Must not block
  absl::Duration client_timeout;         // a client that takes nothing for so long is gone
  std::string model;                     // the name that requests may give
  std::optional<nlohmann::json> tokenizer_config;  // of the model's folder
  std::optional<std::string> chat_template;        // that serves
  std::shared_ptr<proto::ServerTls> tls;           // null: plain
};

class HttpFront {
 public:
  // Listens and serves. UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<HttpFront>> Start(HttpFrontOptions options);
  virtual ~HttpFront() = default;

  virtual int port() const = 0;
  // Stops accepting, gives answers `grace` to be written, and closes. REQUIRES: all requests have
  // been ended.
  virtual void Stop(absl::Duration grace) = 0;
};

}  // namespace kvasir::coordinator
