#include "worker/peers/part_memory.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kvstore/format/page_format.h"

namespace kvasir::worker {
namespace {

using kernels::HostArena;
using kernels::MutexLock;

// Idle parts beyond this are given back to the arena, which gives back a buffer when none of its
// parts is left.
constexpr int64_t kMostIdleBytes = int64_t{64} << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<const PartMemory::Part>> PartMemory::Take(int64_t bytes) {
  MutexLock lock(idle_->mu);
  // The last that was given back is in a cache.
  const auto found = std::find_if(idle_->parts.rbegin(), idle_->parts.rend(),
                                  [&](const auto& part) { return part.first == bytes; });
  if (found != idle_->parts.rend()) {
    HostArena::Piece memory = std::move(found->second);
    idle_->parts.erase(std::next(found).base());
    return std::make_shared<const Part>(idle_, bytes, std::move(memory));
  }
  KVASIR_ASSIGN_OR_RETURN(HostArena::Piece memory,
                          idle_->arena.Take(bytes + kvstore::kExtentAlignment));
  return std::make_shared<const Part>(idle_, bytes, std::move(memory));
}

absl::Span<std::byte> PartMemory::Part::bytes() const {
  const auto past = -reinterpret_cast<uintptr_t>(memory_.data) % kvstore::kExtentAlignment;
  return {memory_.data + past, static_cast<size_t>(bytes_)};
}

PartMemory::Part::~Part() {
  MutexLock lock(home_->mu);
  if ((std::ssize(home_->parts) + 1) * bytes_ <= kMostIdleBytes) {
    home_->parts.emplace_back(bytes_, std::move(memory_));
  }
}

}  // namespace kvasir::worker
