// The calls of /v1/contexts (proto/kvasir/v1/contexts.proto): names of documents, in JSON. It hides
// the paths below it. Thread-safe.
#pragma once

#include <memory>

#include "absl/strings/string_view.h"

#include "coordinator/http/http_call.h"
#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

bool IsContextPath(absl::string_view path);
// Answers any method and any path for which IsContextPath holds.
void ServeContexts(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);

}  // namespace kvasir::coordinator
