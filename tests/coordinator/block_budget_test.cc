#include "coordinator/scheduling/block_budget.h"

#include <utility>

#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

TEST(BlockBudgetTest, AReservationThatIsDestroyedGivesItsBlocksBack) {
  BlockBudget budget(kvstore::PrefixIndex::Create(10));
  {
    const BlockReservation reservation = budget.Reserve(4);
    EXPECT_EQ(reservation.num_blocks(), 4);
    EXPECT_EQ(budget.unreserved(), 6);
  }
  EXPECT_EQ(budget.unreserved(), 10);
  EXPECT_EQ(budget.reserved(), 0);
}

TEST(BlockBudgetTest, ReservedBlocksAreTakenFirst) {
  BlockBudget budget(kvstore::PrefixIndex::Create(10));
  BlockReservation reservation = budget.Reserve(1);
  const kvstore::Block reserved = reservation.Take();
  EXPECT_EQ(reservation.num_blocks(), 0);
  EXPECT_EQ(budget.unreserved(), 9);
  const kvstore::Block unreserved = reservation.Take();
  EXPECT_EQ(reservation.num_blocks(), 0);
  EXPECT_EQ(budget.unreserved(), 8);
}

TEST(BlockBudgetTest, ABlockThatIsTakenBackIsReservedAgain) {
  BlockBudget budget(kvstore::PrefixIndex::Create(10));
  BlockReservation reservation = budget.Reserve(2);
  kvstore::Block block = reservation.Take();
  block = {};
  reservation.TakeBack();
  EXPECT_EQ(reservation.num_blocks(), 2);
  EXPECT_EQ(budget.unreserved(), 8);
  reservation.Release();
  EXPECT_EQ(budget.unreserved(), 10);
}

TEST(BlockBudgetTest, AReservationThatMovesIsCountedOnce) {
  BlockBudget budget(kvstore::PrefixIndex::Create(10));
  BlockReservation first = budget.Reserve(3);
  BlockReservation second = budget.Reserve(2);
  second = std::move(first);
  EXPECT_EQ(second.num_blocks(), 3);
  EXPECT_EQ(budget.reserved(), 3);
}

}  // namespace
}  // namespace kvasir::coordinator
