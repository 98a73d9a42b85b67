#include "coordinator/group/leader_worker_set.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::string_view kPrefix = "lws:";
constexpr int kMostPods = 1025;  // the leader and the most ranks of --tensor-parallel-size
constexpr int kLargestPort = 65535;

absl::StatusOr<std::string> Variable(const char* name,
                                     const std::function<const char*(const char*)>& getenv) {
  const char* value = getenv(name);
  if (value != nullptr && *value != '\0') return std::string(value);
  return absl::InvalidArgumentError(
      absl::StrCat("--workers=lws:PORT needs ", name,
                   ", which LeaderWorkerSet sets in each pod of a group; name addresses instead"));
}

}  // namespace

bool NamesLeaderWorkerSet(absl::string_view workers) { return absl::StartsWith(workers, kPrefix); }

absl::StatusOr<std::vector<std::string>> LeaderWorkerSetWorkers(
    absl::string_view workers, const std::function<const char*(const char*)>& getenv) {
  int port = 0;
  if (!absl::SimpleAtoi(absl::StripPrefix(workers, kPrefix), &port) || port < 1 ||
      port > kLargestPort) {
    return absl::InvalidArgumentError(
        absl::StrCat("--workers is '", workers, "'; expected lws:PORT with a port of 1 to 65535"));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string leader, Variable("LWS_LEADER_ADDRESS", getenv));
  KVASIR_ASSIGN_OR_RETURN(const std::string text, Variable("LWS_GROUP_SIZE", getenv));
  int pods = 0;
  if (!absl::SimpleAtoi(text, &pods) || pods < 2 || pods > kMostPods) {
    return absl::InvalidArgumentError(
        absl::StrCat("LWS_GROUP_SIZE is '", text,
                     "'; expected 2 to 1025: the leader runs the coordinator, each other pod a "
                     "worker. Change `size` of the LeaderWorkerSet"));
  }
  const size_t dot = leader.find('.');
  const std::string group = leader.substr(0, dot);
  const std::string domain = dot == std::string::npos ? "" : leader.substr(dot);
  std::vector<std::string> addresses;
  for (int pod = 1; pod < pods; ++pod) {
    addresses.push_back(absl::StrCat(group, "-", pod, domain, ":", port));
  }
  return addresses;
}

}  // namespace kvasir::coordinator
