// Facts that both ends of worker.proto must agree on besides its messages.
#pragma once

#include <cstdint>

namespace kvasir::proto {

// ShardPlan.protocol_version: raised with every change of worker.proto that an older end would
// misunderstand. Coordinator and workers have the same release, so there is no range of versions.
inline constexpr uint32_t kWorkerProtocolVersion = 12;

// Name of a worker's readiness in grpc.health.v1; "" is its liveness.
inline constexpr char kWorkerServiceName[] = "kvasir.v1.Worker";

// Limit for messages in both directions. A prompt travels in one plan, perhaps beside a block: 16M
// token ids take 50 MB.
inline constexpr int kMaxWorkerMessageBytes = 128 << 20;
// Largest block whose bytes may travel, all KV heads together.
inline constexpr int64_t kMaxExchangedBlockBytes = int64_t{48} << 20;

// The coordinator pings every worker, whether it computes or idles, and takes one for dead that
// does not answer in time (--rank-timeout). It pings no more often than this, and the worker's
// server must accept that many pings (GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
// GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS = 1): by default gRPC closes connections that ping more
// than once in five minutes.
inline constexpr int kWorkerMinPingIntervalMs = 250;

}  // namespace kvasir::proto
