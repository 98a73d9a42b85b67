// Connects the commands to a running server. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Returns a channel to "HOST:PORT" or "unix:PATH", for messages as large as the server takes. Its
// calls carry the API key that the file holds; an empty path: none. INVALID_ARGUMENT for a file
// that cannot be read, holds no key, or is of no use for TLS.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& server,
                                                       const std::string& api_key_file,
                                                       const v1::TlsClientConfig& tls);

void SetTimeout(absl::Duration timeout, grpc::ClientContext& context);

}  // namespace kvasir::coordinator
