#include "coordinator/scheduling/block_budget.h"

#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

BlockReservation::BlockReservation(BlockBudget& budget, int64_t num_blocks)
    : budget_(&budget), num_blocks_(num_blocks) {
  budget_->reserved_ += num_blocks;
}

BlockReservation& BlockReservation::operator=(BlockReservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  budget_ = std::exchange(other.budget_, nullptr);
  num_blocks_ = std::exchange(other.num_blocks_, 0);
  return *this;
}

kvstore::Block BlockReservation::Take() {
  KVASIR_CHECK(budget_ != nullptr);
  absl::StatusOr<kvstore::Block> block = budget_->index_->Allocate();
  KVASIR_CHECK(block.ok());
  if (num_blocks_ > 0) {
    --num_blocks_;
    --budget_->reserved_;
  }
  return *std::move(block);
}

void BlockReservation::TakeBack() {
  KVASIR_CHECK(budget_ != nullptr);
  ++num_blocks_;
  ++budget_->reserved_;
}

void BlockReservation::Release() {
  if (budget_ == nullptr) return;
  budget_->reserved_ -= num_blocks_;
  num_blocks_ = 0;
  budget_ = nullptr;
}

}  // namespace kvasir::coordinator
