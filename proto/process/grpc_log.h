// gRPC's own log, in ours. Peers cause its errors, those of TLS handshakes above all, so it gets
// one line in 10 s.
#pragma once

namespace kvasir::proto {

// From now on gRPC's errors are warnings of spdlog's default logger. Called once in a process.
void RouteGrpcLog();

}  // namespace kvasir::proto
