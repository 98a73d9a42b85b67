// The sealed blocks of a host tier that other processes may read where they lie: found by hash, by
// the thread that serves peers, while the engine's thread adds and removes them. Who reads for
// long, while bytes are sent, holds nothing: it asks afterwards whether the block was there all the
// time. Who copies makes its removal wait. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "kvstore/format/block.h"

namespace kvasir::kvstore {

class LentBlocks {
 public:
  struct Lent {
    absl::Span<const std::byte> extent;  // whole, with its header
    uint64_t number = 0;                 // of this lending; never the same twice
  };

  // Lends a block's extent until Remove. It replaces another extent with the same block.
  void Add(const PrefixHash& hash, absl::Span<const std::byte> extent) EXCLUDES(mu_);
  // Called before the extent's bytes change: waits for those that read it. Does nothing when
  // another extent is lent in its place.
  void Remove(const PrefixHash& hash, absl::Span<const std::byte> extent) EXCLUDES(mu_);

  std::optional<Lent> Find(const PrefixHash& hash) const EXCLUDES(mu_);
  // Reads a block while it stays what it is. Returns false when it is not lent. Called by one
  // thread at a time.
  bool Read(const PrefixHash& hash, absl::FunctionRef<void(absl::Span<const std::byte>)> read)
      EXCLUDES(mu_);
  // Whether this lending has not ended.
  bool IsStillLent(const PrefixHash& hash, uint64_t number) const EXCLUDES(mu_);

 private:
  mutable kernels::Mutex mu_;
  kernels::CondVar read_ended_;
  std::optional<PrefixHash> being_read_ GUARDED_BY(mu_);
  uint64_t next_number_ GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<PrefixHash, Lent> by_hash_ GUARDED_BY(mu_);
};

}  // namespace kvasir::kvstore
