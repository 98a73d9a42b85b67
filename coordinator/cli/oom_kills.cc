#include "coordinator/cli/oom_kills.h"

#include <fstream>
#include <utility>

namespace kvasir::coordinator {

OomKills::OomKills(std::string root) : path_(std::move(root) + "/proc/vmstat"), seen_(Count()) {}

bool OomKills::TakeNew() {
  const int64_t before = std::exchange(seen_, Count());
  return seen_ > before;
}

int64_t OomKills::Count() const {
  std::ifstream file(path_);
  std::string name;
  for (int64_t count = 0; file >> name >> count;) {
    if (name == "oom_kill") return count;
  }
  return 0;  // this kernel does not count them
}

}  // namespace kvasir::coordinator
