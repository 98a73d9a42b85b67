#include "worker/backend/memory_limit.h"

#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

// The files of one version of control groups.
struct Version {
  absl::string_view folder;  // of the root group
  absl::string_view limit;
  absl::string_view used;  // line of memory.stat: what cannot be given back
};
constexpr Version kFirst = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"};
constexpr Version kSecond = {"/sys/fs/cgroup", "memory.max", "anon"};

// The number alone in a file, or behind `name` in one of its lines.
std::optional<int64_t> ReadNumber(const std::string& path, absl::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, name)) continue;
    int64_t number = 0;
    if (absl::SimpleAtoi(rest, &number)) return number;  // not "max"
  }
  return std::nullopt;
}

absl::Status CheckGroup(const std::string& folder, const Version& version, int64_t bytes,
                        absl::string_view flag) {
  const auto limit = ReadNumber(absl::StrCat(folder, "/", version.limit), "");
  if (!limit.has_value()) return absl::OkStatus();
  const int64_t used =
      ReadNumber(absl::StrCat(folder, "/memory.stat"), absl::StrCat(version.used, " ")).value_or(0);
  if (bytes <= *limit - used) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("need ", bytes, " bytes of host memory; ", folder, " allows ", *limit, ", ",
                   used, " of them taken; lower ", flag, " or raise the limit of this container"));
}

}  // namespace

absl::Status CheckMemoryLimit(int64_t bytes, absl::string_view flag, const std::string& root) {
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || (!parts[1].empty() && parts[1] != "memory")) continue;
    const Version& version = parts[1].empty() ? kSecond : kFirst;
    // The group's own limit and those of all above it.
    for (std::string path = parts[2];; path.resize(path.rfind('/'))) {
      if (absl::EndsWith(path, "/")) path.pop_back();
      KVASIR_RETURN_IF_ERROR(
          CheckGroup(absl::StrCat(root, version.folder, path), version, bytes, flag));
      if (path.empty()) break;
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
