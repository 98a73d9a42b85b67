#include "kernels/sparse/mass_estimate.h"

#include <cmath>
#include <complex>
#include <gtest/gtest.h>
#include <limits>
#include <span>
#include <vector>

#include "kernels/paged/key_codes.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kContext = 700;
constexpr int64_t kPosition = 650;
constexpr SelectionNumbers kNumbers = {.sink_tokens = 70, .window_tokens = 100};

// Every other token of page 3, page 5 but for what was pruned, nothing else.
RowSelection SomeList() {
  return SelectList(70, kPosition - 99,
                    {{.page = 3, .chosen = 0x5555555555555555, .live = 0x5555555555555555},
                     {.page = 5, .chosen = ~uint64_t{0}, .live = 0xffff}});
}

class MassEstimateTest : public ::testing::Test {
 protected:
  MassEstimateTest() {
    batch_.FillContext(0, kContext);
    batch_.AddBlock(0, kPosition, 1, [](int64_t) { return SomeList(); });
    batch_.AddBlock(0, 640, 2, [](int64_t) { return SomeList(); });
    batch_.AddBlock(0, 300, 1);  // all
  }

  absl::Status Estimate(const std::vector<uint8_t>& wanted = {}) {
    const std::vector<SelectionNumbers> numbers(3, kNumbers);
    selection_ = batch_.Params().selection;
    SelectParams params = batch_.ParamsForSelect(numbers);
    params.wanted = wanted;
    return EstimateMass(params, selection_, mass_, executor_);
  }
  float mass(int64_t row, int64_t g) const { return mass_[static_cast<size_t>(row * 2 + g)]; }

  std::byte* Key(int64_t token, int64_t head) {
    return batch_.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
  }
  std::vector<double> KeyOf(int64_t token, int64_t head, bool exact) {
    const int64_t d = batch_.shape().head_dim;
    std::vector<float> key(static_cast<size_t>(d));
    const PagedKv kv = batch_.kv().View();
    DecodeKey(kv.layout, kv.KeyCodes(0, token / kPageTokens, AttentionBatch::kLayer, head),
              token % kPageTokens, key.data());
    for (int64_t i = 0; i < d && exact; ++i) {
      key[static_cast<size_t>(i)] = batch_.kv().Get(Key(token, head), i);
    }
    return {key.begin(), key.end()};
  }
  // q . k with k `distance` positions before q; 0: as they are.
  double Logit(int64_t head, const std::vector<double>& key, int64_t distance) {
    const int64_t d = batch_.shape().head_dim;
    double sum = 0;
    for (int64_t i = 0; i < d / 2; ++i) {
      const float* q = batch_.q(0, head);
      const std::complex<double> a(q[i], q[i + d / 2]);
      const std::complex<double> b(key[static_cast<size_t>(i)],
                                   key[static_cast<size_t>(i + d / 2)]);
      const double angle = static_cast<double>(distance) * batch_.InverseFrequency(i);
      sum += (a * std::polar(1.0, angle) * std::conj(b)).real();
    }
    return sum / std::sqrt(static_cast<double>(d));
  }
  // Of the first block's row, by the definition.
  double Expected(int64_t head) {
    const SelectionHeader header = selection_.header(head / 2);
    const bool compact = batch_.rope() != nullptr;
    double kept = 0, rest = 0;
    for (int64_t t = 0; t <= kPosition; ++t) {
      const bool between = t >= header.sink_end && t < header.window_begin;
      const bool attended = !between || (t / 64 == 3 && t % 2 == 0) || (t / 64 == 5 && t % 64 < 16);
      const int64_t own_distance =
          QueryPosition(header, kPosition) - (between ? 0 : TokenPosition(header, nullptr, t));
      const int64_t distance = !compact ? 0 : between ? kNumbers.window_tokens : own_distance;
      (attended ? kept : rest) += std::exp(Logit(head, KeyOf(t, head / 2, attended), distance));
    }
    return kept / (kept + rest);
  }

  AttentionBatch batch_{{.head_dim = 64}, 1, kContext, 5};
  SerialExecutor executor_;
  PageSelection selection_;
  std::vector<float> mass_ = std::vector<float>(12, -1);
};

TEST_F(MassEstimateTest, IsTheShareOfWhatIsAttendedTo) {
  ASSERT_TRUE(Estimate().ok());
  for (int64_t head = 0; head < 4; ++head) {
    const float estimate = mass(head / 2, head % 2);
    EXPECT_NEAR(estimate, Expected(head), 1e-5);
    EXPECT_GT(estimate, 0.2);
    EXPECT_LT(estimate, 0.9);
  }
}

TEST_F(MassEstimateTest, UnrotatedCandidatesStandAtOneDistance) {
  batch_.UseCompactPositions();
  ASSERT_TRUE(Estimate().ok());
  for (int64_t head = 0; head < 4; ++head) {
    EXPECT_NEAR(mass(head / 2, head % 2), Expected(head), 1e-4);
  }
}

TEST_F(MassEstimateTest, RowsOfAllKeepAllAndRowsOfSeveralQueriesAreUnknown) {
  ASSERT_TRUE(Estimate().ok());
  for (const int64_t g : {0, 1}) {
    EXPECT_TRUE(std::isnan(mass(2, g)));
    EXPECT_TRUE(std::isnan(mass(3, g)));
    EXPECT_EQ(mass(4, g), 1.0f);
    EXPECT_EQ(mass(5, g), 1.0f);
  }
}

TEST_F(MassEstimateTest, OnlyWantedRowsAreEstimated) {
  ASSERT_TRUE(Estimate({0, 1, 0, 0, 0, 1}).ok());
  for (const int64_t row : {0, 2, 3, 4}) EXPECT_EQ(mass(row, 0), -1.0f);
  EXPECT_GT(mass(1, 0), 0.0f);
  EXPECT_EQ(mass(5, 1), 1.0f);
}

TEST_F(MassEstimateTest, ReadsKeysOfWhatIsAttendedToAndCodesOfTheRest) {
  ASSERT_TRUE(Estimate().ok());
  const std::vector<float> before = mass_;
  batch_.kv().Set(Key(3 * 64 + 1, 0), 0, 100);  // the code stays
  ASSERT_TRUE(Estimate().ok());
  EXPECT_EQ(mass(0, 0), before[0]);
  batch_.kv().Set(Key(3 * 64 + 2, 0), 0, 100);
  ASSERT_TRUE(Estimate().ok());
  EXPECT_NE(mass(0, 0), before[0]);
  EXPECT_EQ(mass(1, 0), before[2]) << "the other KV head has keys of its own";
}

TEST_F(MassEstimateTest, AnAbsentPageIsAFault) {
  batch_.kv().SetTier(0, 5, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(Estimate().ok());
  EXPECT_EQ(batch_.fault(0), 1);
}

TEST_F(MassEstimateTest, APageThatIsNotAttendedToMayBeAbsent) {
  ASSERT_TRUE(Estimate().ok());
  const std::vector<float> before = mass_;
  batch_.kv().SetTier(0, 6, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(Estimate().ok());
  EXPECT_EQ(batch_.fault(0), 0);
  EXPECT_EQ(mass(0, 0), before[0]);
}

// Logits may be of any size: no overflow, and a head with one key of all the mass keeps 0 or 1.
TEST_F(MassEstimateTest, HugeLogitsDecideAlone) {
  struct Case {
    int64_t token;
    float factor, expected;
  };
  for (const auto& [token, factor, expected] : {Case{3 * 64, 400, 1}, Case{6 * 64, 4000, 0}}) {
    for (int64_t i = 0; i < 64; ++i) {
      batch_.kv().Set(Key(token, 0), i, factor * batch_.q(0, 0)[i]);
    }
    ASSERT_TRUE(RebuildKeyCodes(batch_.kv().View(), 0, token / 64, 64).ok());
    ASSERT_TRUE(Estimate().ok());
    EXPECT_EQ(mass(0, 0), expected);
  }
}

TEST_F(MassEstimateTest, NanStaysUnknown) {
  batch_.q(0, 1)[3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Estimate().ok());
  EXPECT_FALSE(std::isnan(mass(0, 0)));
  EXPECT_TRUE(std::isnan(mass(0, 1)));
}

TEST_F(MassEstimateTest, RefusesWhatItCannotDo) {
  const std::vector<SelectionNumbers> numbers(3, kNumbers);
  selection_ = batch_.Params().selection;
  SelectParams params = batch_.ParamsForSelect(numbers);
  EXPECT_EQ(EstimateMass(params, selection_, std::span(mass_).first(11), executor_).code(),
            absl::StatusCode::kInvalidArgument);
  params.kv.key_codes = nullptr;
  EXPECT_EQ(EstimateMass(params, selection_, mass_, executor_).code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvasir::kernels
