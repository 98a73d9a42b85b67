// Events of the prefix cache in the form that cache-aware routers read (vLLM's, as llm-d and Dynamo
// take it): MessagePack arrays by position, the kind first.
//
//   batch    [seconds since 1970, [event, ...], data parallel rank: nil]
//   stored   ["BlockStored", [hash], parent hash or nil, [token, ...], block size, LoRA: nil,
//   medium] removed  ["BlockRemoved", [hash], medium] cleared  ["AllBlocksCleared"]
//
// A hash is the first 8 bytes of the block's chain value, as a number; the medium is "CPU", the
// host tier, which holds every block that can be found. Used by the publisher. Thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

#include "kvstore/format/block.h"

namespace kvasir::coordinator {

// Returns the number by which events name a block.
uint64_t EventHash(const kvstore::PrefixHash& hash);

// Events in the order in which they happened.
class EventBatch {
 public:
  void AddStored(const kvstore::PrefixHash& hash, const kvstore::PrefixHash* parent,
                 absl::Span<const int32_t> tokens);
  void AddRemoved(const kvstore::PrefixHash& hash);
  void AddCleared();

  bool empty() const { return events_ == 0; }
  // Returns the batch as MessagePack.
  std::string Encode(double seconds_since_epoch) const;

 private:
  uint32_t events_ = 0;
  std::string encoded_;  // one after another
};

}  // namespace kvasir::coordinator
