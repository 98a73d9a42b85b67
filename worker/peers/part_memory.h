// Memory for parts of blocks on their way between workers of different degrees, used again and
// again: fresh memory costs more than the copy. Whoever takes a part has it until the last handle
// is gone, on any thread, perhaps beyond the end of the PartMemory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "kvstore/format/extent_memory.h"

namespace kvasir::worker {

class PartMemory {
 private:
  struct Idle;

 public:
  class Part {
   public:
    Part(std::shared_ptr<Idle> home, int64_t bytes, kvstore::ExtentMemory memory)
        : home_(std::move(home)), bytes_(bytes), memory_(std::move(memory)) {}
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    absl::Span<std::byte> bytes() const { return memory_[0]; }

   private:
    const std::shared_ptr<Idle> home_;
    const int64_t bytes_;
    kvstore::ExtentMemory memory_;
  };

  // RESOURCE_EXHAUSTED when there is no memory. REQUIRES: `bytes` is the size of an extent.
  absl::StatusOr<std::shared_ptr<const Part>> Take(int64_t bytes);

 private:
  struct Idle {
    kernels::Mutex mu;
    std::vector<std::pair<int64_t, kvstore::ExtentMemory>> parts GUARDED_BY(mu);  // by their bytes
  };

  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
};

}  // namespace kvasir::worker
