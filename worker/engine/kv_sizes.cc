#include "worker/engine/kv_sizes.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

// Divisors of the host's memory: one half is left to other programs. A device tier in host memory
// is a second copy of pages in use, and need not be large.
constexpr int64_t kHostParts = 2;
constexpr int64_t kDeviceParts = 5;

absl::Status NoRoomForDigests(int64_t digests, int64_t left, int64_t host) {
  const auto gb = [](int64_t bytes) { return static_cast<double>(bytes) / 1e9; };
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the GPU keeps bounds and key codes of all blocks that a host tier of %.1f GB and "
      "--kv-on-demand-size-gb have room for: %.1f GB, and weights and activations leave %.1f GB "
      "for them and the device tier; lower --kv-host-size-gb or --kv-on-demand-size-gb, or raise "
      "--gpu-memory-utilization",
      gb(host), gb(digests), gb(left)));
}

}  // namespace

absl::StatusOr<MemoryLeft> LeastMemoryLeft(const MemoryLeft& mine, Collective& collective) {
  constexpr double kMiB = 1 << 20;
  const auto to_mib = [](int64_t bytes) {
    return static_cast<float>(static_cast<double>(bytes) / kMiB);
  };
  const float sent[] = {to_mib(mine.host), to_mib(mine.device.value_or(0))};
  std::vector<float> all(std::size(sent) * static_cast<size_t>(collective.size()));
  KVASIR_RETURN_IF_ERROR(collective.AllGather(sent, absl::MakeSpan(all)));
  MemoryLeft left = {.host = std::numeric_limits<int64_t>::max(), .device = mine.device};
  for (size_t i = 0; i < all.size(); i += std::size(sent)) {
    const auto bytes = [&](size_t j) {
      return static_cast<int64_t>(static_cast<double>(all[i + j]) * kMiB);
    };
    left.host = std::min(left.host, bytes(0));
    if (left.device.has_value()) left.device = std::min(*left.device, bytes(1));
  }
  return left;
}

absl::StatusOr<KvSizes> ChooseKvSizes(const KvSizeOptions& options, const MemoryLeft& left) {
  const int64_t share = left.host / kHostParts / options.ranks_on_machine;
  KvSizes sizes = options.given;
  if (left.device.has_value()) {
    if (sizes.host == 0) sizes.host = std::min(share, options.most);
    if (sizes.device != 0) return sizes;
    const auto digests =
        static_cast<int64_t>(options.host_digests * static_cast<double>(sizes.host)) +
        options.other_digests;
    if (digests >= *left.device) return NoRoomForDigests(digests, *left.device, sizes.host);
    sizes.device = std::min(*left.device - digests, options.most);
    return sizes;
  }
  if (sizes.device == 0) sizes.device = std::min(share / kDeviceParts, options.most);
  if (sizes.host == 0) sizes.host = std::clamp<int64_t>(share - sizes.device, 0, options.most);
  return sizes;
}

}  // namespace kvasir::worker
