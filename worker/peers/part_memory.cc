#include "worker/peers/part_memory.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

using kernels::MutexLock;

// Idle memory beyond this is given back.
constexpr int64_t kMostIdleBytes = int64_t{64} << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<const PartMemory::Part>> PartMemory::Take(int64_t bytes) {
  {
    MutexLock lock(idle_->mu);
    const auto found = std::find_if(idle_->parts.begin(), idle_->parts.end(),
                                    [&](const auto& part) { return part.first == bytes; });
    if (found != idle_->parts.end()) {
      kvstore::ExtentMemory memory = std::move(found->second);
      idle_->parts.erase(found);
      return std::make_shared<const Part>(idle_, bytes, std::move(memory));
    }
  }
  KVASIR_ASSIGN_OR_RETURN(kvstore::ExtentMemory memory, kvstore::ExtentMemory::Allocate(1, bytes));
  return std::make_shared<const Part>(idle_, bytes, std::move(memory));
}

PartMemory::Part::~Part() {
  MutexLock lock(home_->mu);
  if ((std::ssize(home_->parts) + 1) * bytes_ <= kMostIdleBytes) {
    home_->parts.emplace_back(bytes_, std::move(memory_));
  }
}

}  // namespace kvasir::worker
