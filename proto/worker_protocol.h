// What both ends of worker.proto must agree on besides its messages.
#pragma once

#include <cstdint>

namespace kvasir::proto {

// ShardPlan.protocol_version: raised with every change of worker.proto that an older end would
// misunderstand. Coordinator and workers are of one release, so there is no range of versions.
inline constexpr uint32_t kWorkerProtocolVersion = 1;

// The name under which a worker's readiness is found in grpc.health.v1; "" is its liveness.
inline constexpr char kWorkerServiceName[] = "kvasir.v1.Worker";

}  // namespace kvasir::proto
