// The blocks that a scheduler may hand out: the index of prefixes, and how many of its available
// blocks are already promised. A BlockReservation is such a promise. It is counted: the budget
// always knows the sum of all reservations, and a reservation that is destroyed gives its blocks
// back. Called by the scheduler. Thread-compatible. A budget outlives its reservations.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "kvstore/format/block.h"
#include "kvstore/index/prefix_index.h"

namespace kvasir::coordinator {

class BlockBudget;

class BlockReservation {
 public:
  BlockReservation() = default;  // no blocks, and none may be taken
  BlockReservation(BlockReservation&& other) noexcept { *this = std::move(other); }
  BlockReservation& operator=(BlockReservation&& other) noexcept;
  ~BlockReservation() { Release(); }

  // Number of blocks that may still be taken without asking whether one is free.
  int64_t num_blocks() const { return num_blocks_; }
  // Returns a new block: a reserved one, or an unreserved one when none is reserved.
  // REQUIRES: made by a budget, and num_blocks() > 0 or unreserved() > 0.
  kvstore::Block Take();
  // Reserves one block more, in place of a block that was taken and is available again.
  void TakeBack();
  // Gives the reserved blocks back. None may be taken afterwards.
  void Release();

 private:
  friend class BlockBudget;
  BlockReservation(BlockBudget& budget, int64_t num_blocks);

  BlockBudget* budget_ = nullptr;
  int64_t num_blocks_ = 0;
};

class BlockBudget {
 public:
  explicit BlockBudget(std::unique_ptr<kvstore::PrefixIndex> index) : index_(std::move(index)) {}

  kvstore::PrefixIndex& index() const { return *index_; }
  int64_t capacity() const { return index_->stats().capacity_blocks; }
  // Number of available blocks that nobody has reserved.
  int64_t unreserved() const { return index_->available_blocks() - reserved_; }
  // Sum of all reservations.
  int64_t reserved() const { return reserved_; }
  // REQUIRES: num_blocks <= unreserved().
  BlockReservation Reserve(int64_t num_blocks) { return {*this, num_blocks}; }

 private:
  friend class BlockReservation;

  const std::unique_ptr<kvstore::PrefixIndex> index_;
  int64_t reserved_ = 0;
};

}  // namespace kvasir::coordinator
