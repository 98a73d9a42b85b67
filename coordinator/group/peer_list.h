// The replicas that --peers names, as the ranks of this group see them. A function without state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// Returns the addresses that each rank asks, by rank; empty without peers. A replica is given by
// the address of its rank 0, whose further ranks have the following ports, with "*N" where they are
// not as many as here; or by the addresses of all of them, joined by '+'. Of a replica with as many
// ranks a rank asks the same one, of others all that may have some of its KV heads.
// INVALID_ARGUMENT for what is no address.
absl::StatusOr<std::vector<std::vector<std::string>>> ParsePeers(absl::string_view peers,
                                                                 int64_t num_ranks);

// Returns the address of `rank` where rank 0 has `first`; free ports stay free ones.
// INVALID_ARGUMENT for what is no HOST:PORT, or beyond the last port.
absl::StatusOr<std::string> PeerAddressOfRank(absl::string_view first, int64_t rank);

}  // namespace kvasir::coordinator
