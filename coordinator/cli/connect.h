// Connects the commands to a running server. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace kvasir::coordinator {

// Returns a channel to "HOST:PORT" or "unix:PATH", for messages as large as the server takes.
std::shared_ptr<grpc::Channel> Connect(const std::string& server);

void SetTimeout(absl::Duration timeout, grpc::ClientContext& context);

}  // namespace kvasir::coordinator
