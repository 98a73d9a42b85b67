// Opens the disk tier that a worker's configuration asks for: the stores of its KV heads, whatever
// the degree of the service that wrote them. It hides where in the folder they lie, which rank
// writes a store that several hold, and which failures the service can do without a disk tier.
// Called by the group member when a group forms.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/tier.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::worker {

struct DiskOptions {
  v1::KvConfig config;
  kvstore::KvShard shard;
  int64_t kv_replicas = 1;  // ranks that hold the shard's heads
};

// Returns null when none is configured, and when the disk is full or fails: that is logged, and the
// service goes on without it. Errors are those that somebody must correct: FAILED_PRECONDITION for
// a store that another process has open or that belongs to another model or version of the format,
// INVALID_ARGUMENT for a capacity below one block, PERMISSION_DENIED and the like for a folder that
// cannot be used.
absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenDisk(const DiskOptions& options);

}  // namespace kvasir::worker
