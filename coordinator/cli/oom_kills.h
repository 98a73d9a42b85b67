// Tells whether the kernel has killed a process for lack of memory. A signal alone does not tell,
// but the kernel counts such kills in /proc/vmstat. Thread-compatible.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::coordinator {

class OomKills {
 public:
  // Counts kills from now on. `root` is "" except in tests.
  explicit OomKills(std::string root = "");
  // Returns true when there were kills since the last call.
  bool TakeNew();

 private:
  int64_t Count() const;

  const std::string path_;
  int64_t seen_;
};

}  // namespace kvasir::coordinator
