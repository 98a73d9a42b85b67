// Addresses of the workers in a group of a Kubernetes LeaderWorkerSet whose leader runs the
// coordinator: --workers=lws:PORT. The controller gives each pod LWS_LEADER_ADDRESS, the host name
// of the leader (GROUP.SUBDOMAIN.NAMESPACE), and LWS_GROUP_SIZE, leader included. Pod I of the
// group is GROUP-I, in the same subdomain. Called by `kvasir serve`. Stateless.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// Whether --workers names a LeaderWorkerSet instead of addresses.
bool NamesLeaderWorkerSet(absl::string_view workers);

// Returns HOST:PORT of pods 1, 2, ... of the group: rank 0 first. `getenv` returns the value of an
// environment variable, or null. INVALID_ARGUMENT when the port or a variable is missing or wrong.
absl::StatusOr<std::vector<std::string>> LeaderWorkerSetWorkers(
    absl::string_view workers, const std::function<const char*(const char*)>& getenv);

}  // namespace kvasir::coordinator
