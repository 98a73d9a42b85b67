// The summary that `kvasir generate` prints at the end.
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/cli/generate_command.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Bug: the summary said "unknown (not sampled)" in all of these cases.
TEST(FinishSummaryTest, SaysWhyMassWasNotMeasured) {
  std::set<std::string> told;
  for (int why = v1::MassUnmeasured_MIN; why <= v1::MassUnmeasured_MAX; ++why) {
    v1::Finish finish;
    finish.mutable_attention()->set_decode_mass_unmeasured(static_cast<v1::MassUnmeasured>(why));
    told.insert(FinishSummary(finish));
  }
  EXPECT_EQ(told.size(), static_cast<size_t>(v1::MassUnmeasured_ARRAYSIZE));
}

TEST(FinishSummaryTest, TellsMassesApartByPhaseAndBySource) {
  v1::Finish finish;
  v1::AttentionReport& attention = *finish.mutable_attention();
  attention.set_prefill_mass_unmeasured(v1::MASS_UNMEASURED_DENSE);
  attention.mutable_decode_measured_mass()->set_mean(0.25f);
  attention.mutable_decode_measured_mass()->set_samples(1200);
  EXPECT_THAT(
      FinishSummary(finish),
      HasSubstr("  attention mass kept      prefill: all: this part of the policy attends to "
                "everything\n"
                "                           decode: mean 0.2500, p1 0.000, min 0.0000 (1,200 "
                "samples, measured)\n"));
  EXPECT_THAT(FinishSummary(finish), Not(HasSubstr("estimated")));
  attention.mutable_estimated_mass()->set_mean(0.5f);
  EXPECT_THAT(FinishSummary(finish), HasSubstr("decode: mean 0.5000, p1 0.000, min 0.0000 "
                                               "(0 samples, estimated)\n"));
}

}  // namespace
}  // namespace kvasir::coordinator
