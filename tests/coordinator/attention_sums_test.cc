#include "coordinator/scheduling/attention_sums.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

v1::MassSamples Samples(const std::vector<std::pair<uint32_t, uint64_t>>& by_permille) {
  v1::MassSamples mass;
  mass.set_minimum(1);
  for (const auto& [permille, samples] : by_permille) {
    const float value = static_cast<float>(permille) / 1000;
    (*mass.mutable_by_permille())[permille] = samples;
    mass.set_samples(mass.samples() + samples);
    mass.set_sum(mass.sum() + static_cast<double>(value) * static_cast<double>(samples));
    mass.set_minimum(std::min(mass.minimum(), value));
  }
  return mass;
}

TEST(MassSamplesTest, TheFirstPercentileIsWhatNinetyNineOfAHundredReach) {
  EXPECT_FLOAT_EQ(Summarize(Samples({{250, 1}, {750, 99}})).p1(), 0.75f);
  EXPECT_FLOAT_EQ(Summarize(Samples({{250, 2}, {750, 98}})).p1(), 0.25f);
  EXPECT_FLOAT_EQ(Summarize(Samples({{1000, 5}})).p1(), 1.0f);
  EXPECT_FLOAT_EQ(Summarize(Samples({{100, 1}, {200, 1}, {900, 198}})).p1(), 0.9f);
}

TEST(MassSamplesTest, SumsAreThoseOfAllSamplesTogether) {
  v1::MassSamples sum;
  AddMassSamples({}, sum);
  EXPECT_EQ(sum.samples(), 0u);
  AddMassSamples(Samples({{800, 2}}), sum);
  AddMassSamples({}, sum);  // a rank without samples does not lower the minimum
  AddMassSamples(Samples({{600, 1}, {800, 1}}), sum);
  const v1::MassSummary summary = Summarize(sum);
  EXPECT_EQ(summary.samples(), 4u);
  EXPECT_FLOAT_EQ(summary.mean(), 0.75f);
  EXPECT_FLOAT_EQ(summary.minimum(), 0.6f);
  EXPECT_EQ(sum.by_permille().at(800), 3u);
}

}  // namespace
}  // namespace kvasir::coordinator
