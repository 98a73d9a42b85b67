#include "worker/engine/kv_sizes.h"

#include <algorithm>

namespace kvasir::worker {
namespace {

// Divisors of the host's memory: one half is left to other programs. A device tier in host memory
// is a second copy of pages in use, and need not be large.
constexpr int64_t kHostParts = 2;
constexpr int64_t kDeviceParts = 5;

}  // namespace

KvSizes ChooseKvSizes(const KvSizeOptions& options, const MemoryLeft& left) {
  const int64_t share = left.host / kHostParts / options.ranks_on_machine;
  KvSizes sizes = options.given;
  if (sizes.device == 0) {
    sizes.device = std::min(left.device.value_or(share / kDeviceParts), options.most);
  }
  if (sizes.host == 0) {
    const int64_t beside = left.device.has_value() ? 0 : sizes.device;
    sizes.host = std::clamp<int64_t>(share - beside, 0, options.most);
  }
  return sizes;
}

}  // namespace kvasir::worker
