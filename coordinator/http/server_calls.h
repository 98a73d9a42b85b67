// Calls of the HTTP API about the server itself: health, version, load and the served model. Each
// answers at once. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "coordinator/http/http_call.h"
#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

// 200 when requests are served, 503 with the reason when not.
void GetHealth(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void GetVersion(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void GetLoad(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void GetTokenizerInfo(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
// 503 until the model is loaded.
void GetModels(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void GetModel(const HttpCallContext& context, const std::string& id,
              std::shared_ptr<Exchange> exchange);

}  // namespace kvasir::coordinator
