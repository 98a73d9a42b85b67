// The configuration of a server as its parts need it: names, policies, the plan of a shard, the
// options of others. Made from defaults and sizes in one place, so that the server only puts the
// parts together. Functions without state: thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/events/kv_event_publisher.h"
#include "coordinator/policy/policy.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

std::string ModelName(const v1::ServeConfig& config);
absl::StatusOr<PolicyTable> MakePolicies(const v1::ServeConfig& config);
std::vector<std::string> NamesOf(const PolicyTable& policies);
// Returns a multiple of the block size. A GPU gains from longer steps, up to a bound
// (docs/measurements.md).
uint32_t TokensOfStep(const v1::ServeConfig& config);
v1::ShardPlan MakeShardPlan(const v1::ServeConfig& config, const PolicyTable& policies);
// How streams to workers and to a collector of traces speak: this server's certificate is theirs
// too, where they ask for one.
v1::TlsClientConfig TlsToOthers(const v1::ServeConfig& config);
KvEventOptions KvEventOptionsOf(const v1::ServeConfig& config);
// Opens the contexts of --contexts-path, or of a folder beside the stores on disk. Where that one
// cannot be used they end with the process, and the log says so.
absl::StatusOr<std::unique_ptr<Contexts>> OpenContexts(const v1::ServeConfig& config, Clock& clock,
                                                       Metrics& metrics);

}  // namespace kvasir::coordinator
