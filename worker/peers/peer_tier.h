// The tier below the host tier of a worker with peers: its own disk, if it has one, and workers of
// other replicas that have its KV heads (docs/decisions/0021). Blocks that the disk does not hold
// are asked for there. Every byte that comes is verified on a thread of its own before a read
// completes. The same node lends this worker's sealed blocks to its peers. It hides links,
// greetings and which peer was asked. Made by the group member; thread-compatible as a Tier.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/tier.h"
#include "proto/security/group_secret.h"

namespace kvasir::worker {

struct PeerTierOptions {
  // HOST:PORT on which peers reach this worker. HOST is an address of this machine.
  std::string listen = "127.0.0.1:0";
  std::string transports = "sm,tcp";  // as PeerNodeOptions
  kvstore::KvShard shard;
  std::vector<std::string> peers = {};  // HOST:PORT each
  std::shared_ptr<const proto::GroupSecret> secret;
  std::chrono::milliseconds patience{2000};  // as PeerBorrowerOptions
};

class PeerTier : public kvstore::Tier {
 public:
  // `disk` may be null. INVALID_ARGUMENT for an address that is none of this machine, UNAVAILABLE
  // with UCX's reason.
  static absl::StatusOr<std::unique_ptr<PeerTier>> Create(const PeerTierOptions& options,
                                                          std::unique_ptr<kvstore::Tier> disk);
  // HOST:PORT on which it listens, as numbers.
  virtual const std::string& address() const = 0;
};

}  // namespace kvasir::worker
