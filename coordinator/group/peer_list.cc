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

namespace {

// Returns the addresses of a replica's workers, rank 0 first.
absl::StatusOr<std::vector<std::string>> ParseReplica(absl::string_view replica,
                                                      int64_t num_ranks) {
  constexpr int64_t kMostRanks = 1024;
  std::vector<absl::string_view> given = absl::StrSplit(replica, '+');
  const bool is_each = given.size() > 1;
  int64_t count = num_ranks;
  if (const size_t star = replica.rfind('*'); star != absl::string_view::npos) {
    if (is_each || !absl::SimpleAtoi(replica.substr(star + 1), &count) || count < 1 ||
        count > kMostRanks) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", replica, "' is no replica; write HOST:PORT*N for N workers, at most ",
                       kMostRanks, ", on ports that follow each other"));
    }
    given[0] = replica.substr(0, star);
  }
  if (is_each) count = static_cast<int64_t>(given.size());
  std::vector<std::string> workers;
  for (int64_t rank = 0; rank < count; ++rank) {
    KVASIR_ASSIGN_OR_RETURN(
        workers.emplace_back(),
        PeerAddressOfRank(given[is_each ? static_cast<size_t>(rank) : 0], is_each ? 0 : rank));
  }
  return workers;
}

// Whether a rank of `num` and one of `others` may have a KV head in common: ranks have equal shares
// of the heads, in order.
bool MayShareHeads(int64_t rank, int64_t num, int64_t other, int64_t others) {
  return rank * others < (other + 1) * num && other * num < (rank + 1) * others;
}

}  // namespace

absl::StatusOr<std::vector<std::vector<std::string>>> ParsePeers(absl::string_view peers,
                                                                 int64_t num_ranks) {
  std::vector<std::vector<std::string>> by_rank;
  for (const absl::string_view part : absl::StrSplit(peers, ',', absl::SkipWhitespace())) {
    const auto workers = ParseReplica(absl::StripAsciiWhitespace(part), num_ranks);
    if (!workers.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--peers: ", workers.status().message()));
    }
    by_rank.resize(static_cast<size_t>(num_ranks));
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      for (int64_t other = 0; other < std::ssize(*workers); ++other) {
        if (MayShareHeads(rank, num_ranks, other, std::ssize(*workers))) {
          by_rank[static_cast<size_t>(rank)].push_back((*workers)[static_cast<size_t>(other)]);
        }
      }
    }
  }
  return by_rank;
}

}  // namespace kvasir::coordinator
