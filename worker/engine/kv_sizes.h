// Chooses sizes of the KV tiers that the flags leave open, from the memory that the machine has
// left once the model is loaded, shared among the ranks of the machine. Functions without state.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"

#include "worker/parallel/collective.h"

namespace kvasir::worker {

// Bytes. 0 in an argument: open.
struct KvSizes {
  int64_t device = 0;
  int64_t host = 0;
};

// Bytes that are free.
struct MemoryLeft {
  int64_t host = 0;               // shared by the ranks of the machine (backend/memory_limit.h)
  std::optional<int64_t> device;  // of this rank's own device; none: both tiers lie in host memory
};

// Returns the least that any rank has. All ranks call it together.
absl::StatusOr<MemoryLeft> LeastMemoryLeft(const MemoryLeft& mine, Collective& collective);

struct KvSizeOptions {
  KvSizes given;
  int64_t ranks_on_machine = 1;
  int64_t most = 0;  // of either tier: more would never be used
  // Digests (bounds, key codes) that a device with its own memory keeps of all blocks: of the host
  // tier in bytes for a byte of that tier, and of others.
  double host_digests = 0;
  int64_t other_digests = 0;
};

// The device tier takes all of a device's own memory that digests leave. Half of the host's memory
// goes to the tiers that lie there; a fifth of that half to the device tier if it is one of them.
// RESOURCE_EXHAUSTED where digests leave a device nothing.
absl::StatusOr<KvSizes> ChooseKvSizes(const KvSizeOptions& options, const MemoryLeft& left);

}  // namespace kvasir::worker
