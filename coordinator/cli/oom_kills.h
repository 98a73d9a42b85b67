// Whether the kernel has killed a process for lack of memory, as a signal alone does not tell: it
// counts such kills (/proc/vmstat). Thread-compatible.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::coordinator {

class OomKills {
 public:
  // Counts from here on. `root` is "" but in tests.
  explicit OomKills(std::string root = "");
  // True when there were any since the last call.
  bool TakeNew();

 private:
  int64_t Count() const;

  const std::string path_;
  int64_t seen_;
};

}  // namespace kvasir::coordinator
