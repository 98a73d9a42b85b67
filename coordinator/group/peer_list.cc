#include "coordinator/group/peer_list.h"

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

absl::StatusOr<std::string> PeerAddressOfRank(absl::string_view first, int64_t rank) {
  constexpr int64_t kLastPort = 65535;
  const size_t colon = first.rfind(':');
  int64_t port = -1;
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(first.substr(colon + 1), &port) || port < 0 || port > kLastPort) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", first, "' is no address of a peer; write HOST:PORT"));
  }
  if (port == 0) return std::string(first);
  if (port + rank > kLastPort) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", first, "' leaves no port for rank ", rank, "; the last is ", kLastPort));
  }
  return absl::StrCat(first.substr(0, colon + 1), port + rank);
}

absl::StatusOr<std::vector<std::vector<std::string>>> ParsePeers(absl::string_view peers,
                                                                 int64_t num_ranks) {
  std::vector<std::vector<std::string>> by_rank;
  for (const absl::string_view part : absl::StrSplit(peers, ',', absl::SkipWhitespace())) {
    const absl::string_view replica = absl::StripAsciiWhitespace(part);
    const std::vector<absl::string_view> given = absl::StrSplit(replica, '+');
    if (given.size() != 1 && static_cast<int64_t>(given.size()) != num_ranks) {
      return absl::InvalidArgumentError(absl::StrCat("--peers: '", replica, "' has ", given.size(),
                                                     " workers, this server ", num_ranks,
                                                     "; peers must have as many"));
    }
    by_rank.resize(static_cast<size_t>(num_ranks));
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const bool is_each = given.size() > 1;
      absl::StatusOr<std::string> address =
          PeerAddressOfRank(given[is_each ? static_cast<size_t>(rank) : 0], is_each ? 0 : rank);
      if (!address.ok()) {
        return absl::InvalidArgumentError(absl::StrCat("--peers: ", address.status().message()));
      }
      by_rank[static_cast<size_t>(rank)].push_back(*std::move(address));
    }
  }
  return by_rank;
}

}  // namespace kvasir::coordinator
