// A KV head's store on disk that another process writes: where several ranks hold a head, one of
// them has the store open and the others follow it. A follower reads extents and never writes. It
// finds them by their headers in the segment files, first when it is opened, and later while it
// expects some: blocks that it was given to write, which the owner was given too. What the owner
// evicts or replaces while it is read is a miss.
//
// It hides one thread that reads and looks. Made by the worker. Thread-compatible as a Tier.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

struct FollowedStoreOptions {
  std::string directory;
  KvShard shard;
  int64_t capacity_bytes = 0;  // that the owner has, as far as this process knows
  std::chrono::steady_clock::duration look_every = std::chrono::milliseconds(50);
  // Time after which a block that the owner has not written is not expected any more.
  std::chrono::steady_clock::duration patience = std::chrono::seconds(30);
  std::unique_ptr<FileIo> io = MakeFileIo(IoEngine::kIoUringOrThreads);
};

// Finds what is stored. FAILED_PRECONDITION when that is KV of another model, shard or version.
// Nothing need be there yet.
absl::StatusOr<std::unique_ptr<Tier>> FollowStore(FollowedStoreOptions options);

}  // namespace kvasir::kvstore
