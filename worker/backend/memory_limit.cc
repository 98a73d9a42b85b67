#include "worker/backend/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvasir::worker {
namespace {

// Files of one version of control groups.
struct Version {
  absl::string_view folder;  // of the root group
  absl::string_view limit;
  // Lines of memory.stat: memory that cannot be reclaimed, of processes and in shared memory.
  absl::string_view used;
  absl::string_view shared;
};
constexpr Version kFirst = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss",
                            "total_shmem"};
constexpr Version kSecond = {"/sys/fs/cgroup", "memory.max", "anon", "shmem"};

// Reads the only number of a file, or the one after `name` in one of its lines, without its unit.
std::optional<int64_t> ReadNumber(const std::string& path, absl::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, name)) continue;
    absl::ConsumeSuffix(&rest, " kB");
    int64_t number = 0;
    if (absl::SimpleAtoi(rest, &number)) return number;  // not "max"
  }
  return std::nullopt;
}

struct Group {
  std::string folder;
  int64_t limit = 0;
  int64_t used = 0;  // memory that cannot be reclaimed
};

// Returns the groups of this process that have a limit, including those above its own.
std::vector<Group> LimitedGroups(const std::string& root) {
  std::vector<Group> limited;
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string entry; std::getline(groups, entry);) {
    const std::vector<std::string> parts = absl::StrSplit(entry, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || (!parts[1].empty() && parts[1] != "memory")) continue;
    const Version& version = parts[1].empty() ? kSecond : kFirst;
    for (std::string path = parts[2];; path.resize(path.rfind('/'))) {
      if (absl::EndsWith(path, "/")) path.pop_back();
      const std::string folder = absl::StrCat(root, version.folder, path);
      if (const auto limit = ReadNumber(absl::StrCat(folder, "/", version.limit), "")) {
        const auto stat = [&](absl::string_view line) {
          return ReadNumber(absl::StrCat(folder, "/memory.stat"), absl::StrCat(line, " "))
              .value_or(0);
        };
        limited.push_back(
            {.folder = folder, .limit = *limit, .used = stat(version.used) + stat(version.shared)});
      }
      if (path.empty()) break;
    }
  }
  return limited;
}

}  // namespace

absl::Status CheckMemoryLimit(int64_t bytes, absl::string_view flag, const std::string& root) {
  for (const Group& group : LimitedGroups(root)) {
    if (bytes <= group.limit - group.used) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "need ", bytes, " bytes of host memory; ", group.folder, " allows ", group.limit, ", ",
        group.used, " of them taken; lower ", flag, " or raise the limit of this container"));
  }
  return absl::OkStatus();
}

int64_t HostMemoryLeft(const std::string& root) {
  constexpr int64_t kKiB = 1024;
  // A group of version 1 without a limit reports a number that no machine reaches.
  const auto free = ReadNumber(absl::StrCat(root, "/proc/meminfo"), "MemAvailable:");
  constexpr int64_t kNoLimit = int64_t{1} << 56;
  std::optional<int64_t> left;
  for (const Group& group : LimitedGroups(root)) {
    if (group.limit >= kNoLimit) continue;
    left = std::min(left.value_or(kNoLimit), std::max<int64_t>(0, group.limit - group.used));
  }
  return left.value_or(free.value_or(0) * kKiB);
}

}  // namespace kvasir::worker
