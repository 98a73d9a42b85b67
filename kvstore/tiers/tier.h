// A place for whole extents below the host tier: the disk. Asynchronous and batched: requests are
// handed over, the memory they name stays as it is until their completion has been polled. A tier
// may forget any block at any time and says so; it never gives back bytes that are not those of the
// block. Called by the KV store; tests/support has a double. Thread-compatible: the engine's thread
// only.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kvstore/page_format.h"

namespace kvasir::kvstore {

struct TierWrite {
  uint64_t ticket = 0;  // names the completion; the caller's choice
  BlockIdentity block;
  absl::Span<const std::byte> extent;  // with its header, aligned to kExtentAlignment
};

struct TierRead {
  uint64_t ticket = 0;
  PrefixHash hash{};
  absl::Span<std::byte> extent;  // aligned to kExtentAlignment
};

struct TierCompletion {
  uint64_t ticket = 0;
  // Of a write: the block survives a restart; UNAVAILABLE when the tier takes no writes now.
  // Of a read: every byte is verified; NOT_FOUND for a block that is not here, DATA_LOSS when it is
  // damaged (then it is forgotten).
  absl::Status status;
  BlockIdentity block;  // of a read
};

struct TierEvents {
  std::vector<TierCompletion> completions;
  std::vector<PrefixHash> forgotten;  // evicted or damaged, since the last call
};

struct StoredBlock {
  PrefixHash hash{};
  std::array<int32_t, kBlockTokens> tokens{};
};

// Counters since the tier was opened, unless said otherwise.
struct TierStats {
  int64_t capacity_blocks = 0;
  int64_t blocks = 0;     // now
  bool writable = false;  // now
  int64_t written_blocks = 0;
  int64_t written_bytes = 0;
  double write_seconds = 0;    // spent in writing
  int64_t refused_writes = 0;  // while not writable
  int64_t failed_writes = 0;
  int64_t read_blocks = 0;
  int64_t read_bytes = 0;
  double read_seconds = 0;   // spent in reading and verifying
  int64_t failed_reads = 0;  // by the device
  int64_t checksum_failures = 0;
  int64_t evictions = 0;
};

class Tier {
 public:
  virtual ~Tier() = default;

  // A block that is here already completes as OK.
  virtual void Write(std::vector<TierWrite> writes) = 0;
  virtual void Read(std::vector<TierRead> reads) = 0;
  // What happened since the last call; does not wait.
  virtual TierEvents Poll() = 0;
  // Waits until there is something to poll, or nothing is under way.
  virtual void Wait() = 0;

  virtual const ExtentFormat& format() const = 0;
  virtual bool Holds(const PrefixHash& hash) const = 0;
  virtual std::vector<StoredBlock> Inventory() const = 0;
  // Generations of blocks sealed by this process start here: above all those of its predecessors.
  virtual uint64_t first_generation() const = 0;
  virtual TierStats stats() const = 0;
};

}  // namespace kvasir::kvstore
