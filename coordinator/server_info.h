// Makes the answers of GetModelInfo and GetServerInfo from the state of the server's parts.
// Called by the service. Pure functions: thread-safe.
#pragma once

#include "absl/time/time.h"

#include "coordinator/engine_loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_folder.h"
#include "coordinator/policy/policy.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

v1::GetModelInfoResponse ModelInfo(const v1::ServeConfig& config, const ModelFolder& folder,
                                   const PolicyTable& policies, const GroupInfo& group);

v1::GetServerInfoResponse ServerInfo(const v1::ServeConfig& config, const EngineStatus& engine,
                                     const MetricsTotals& totals, absl::Duration uptime);

}  // namespace kvasir::coordinator
