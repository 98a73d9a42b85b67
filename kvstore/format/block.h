// A counted handle to one token block: 64 tokens over all layers and the rank's KV heads. Copying a
// handle shares the block, and destroying the last one releases the block to its owner: there is no
// Free call to forget. The coordinator's index owns the ids and decides which blocks are kept. A
// worker's store owns the bytes and decides where they lie. Both hand out these handles.
// Thread-safety: handles are values like shared_ptr: different handles to one block may be used and
// destroyed on different threads.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/base/strong_id.h"

namespace kvasir::kvstore {

using kernels::BlockId;

// Tokens of a block: block i of a sequence holds positions [64 i, 64 i + 64).
inline constexpr int64_t kBlockTokens = 64;

// Identity of a full block: the value of the SHA-256 chain after its tokens (kvstore/index).
using PrefixHash = std::array<uint8_t, 32>;

// Notified once, when the last handle to a block is gone. Outlives every handle.
class BlockOwner {
 public:
  virtual ~BlockOwner() = default;
  virtual void Release(BlockId id) = 0;
};

class Block {
 public:
  Block() = default;  // no block
  Block(BlockId id, BlockOwner& owner) : handle_(std::make_shared<const Handle>(id, owner)) {}

  explicit operator bool() const { return handle_ != nullptr; }
  // REQUIRES: holds a block.
  BlockId id() const { return handle_->id; }

 private:
  struct Handle {
    Handle(BlockId i, BlockOwner& o) : id(i), owner(o) {}
    ~Handle() { owner.Release(id); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    const BlockId id;
    BlockOwner& owner;
  };
  std::shared_ptr<const Handle> handle_;
};

}  // namespace kvasir::kvstore
