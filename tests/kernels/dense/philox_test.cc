#include "kernels/sampling/philox.h"

#include <gtest/gtest.h>
#include <set>

namespace kvasir::kernels {
namespace {

// The known answers published with the paper's library (Random123, philox 4x32, 10 rounds).
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformIsInRangeAndUsesAllBitsOfSeedAndPosition) {
  std::set<double> seen;
  double sum = 0;
  for (uint64_t i = 0; i < 64; ++i) {
    for (uint64_t j = 0; j < 64; ++j) {
      const double u = UniformAt(uint64_t{1} << i, uint64_t{1} << j);
      EXPECT_GE(u, 0.0);
      EXPECT_LT(u, 1.0);
      seen.insert(u);
      sum += u;
    }
  }
  EXPECT_EQ(seen.size(), 64u * 64u);
  EXPECT_NEAR(sum / (64 * 64), 0.5, 0.02);
}

}  // namespace
}  // namespace kvasir::kernels
