// Memory for parts of blocks on their way between workers of different degrees, used again and
// again: fresh memory costs more than the copy. It lies in huge pages, since the system that copies
// it to another process looks up every page. Whoever takes a part has it until the last handle is
// gone, on any thread, perhaps beyond the end of the PartMemory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/buffer.h"
#include "kernels/base/mutex.h"

namespace kvasir::worker {

class PartMemory {
 private:
  struct Idle;

 public:
  class Part {
   public:
    Part(std::shared_ptr<Idle> home, int64_t bytes, kernels::HostArena::Piece memory)
        : home_(std::move(home)), bytes_(bytes), memory_(std::move(memory)) {}
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    // Aligned to kExtentAlignment.
    absl::Span<std::byte> bytes() const;

   private:
    const std::shared_ptr<Idle> home_;
    const int64_t bytes_;
    kernels::HostArena::Piece memory_;
  };

  // RESOURCE_EXHAUSTED when there is no memory. REQUIRES: `bytes` is the size of an extent.
  absl::StatusOr<std::shared_ptr<const Part>> Take(int64_t bytes);

 private:
  static constexpr int64_t kBufferBytes = int64_t{32} << 20;  // that parts are cut from
  struct Idle {
    kernels::Mutex mu;
    kernels::HostArena arena GUARDED_BY(mu){kBufferBytes};
    std::vector<std::pair<int64_t, kernels::HostArena::Piece>> parts GUARDED_BY(mu);  // by bytes
  };

  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
};

}  // namespace kvasir::worker
