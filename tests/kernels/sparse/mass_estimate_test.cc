#include "kernels/sparse/quality/mass_estimate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/append/key_code_math.h"
#include "kernels/append/key_codes.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kContext = 3000;
constexpr int64_t kPosition = 2900;
constexpr PolicyNumbers kNumbers = {.sink_tokens = 70, .window_tokens = 1000};

// Every other token of page 3, page 5 except what was pruned, nothing else.
RowSelection SomeList() {
  return SelectList(70, kPosition - 999,
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
    const std::vector<PolicyNumbers> numbers(3, kNumbers);
    selection_ = batch_.Params().selection;
    SelectParams params = batch_.ParamsForSelect(numbers);
    params.wanted = wanted;
    return EstimateMass(params, selection_, mass_, executor_);
  }
  float mass(int64_t row, int64_t g) const { return mass_[static_cast<size_t>(row * 2 + g)]; }

  std::byte* Key(int64_t token, int64_t head) {
    return batch_.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
  }
  // Makes the key of KV head 0 a multiple of the first query.
  void SetKey(int64_t token, float factor) {
    for (int64_t i = 0; i < 64; ++i) {
      batch_.kv().Set(Key(token, 0), i, factor * batch_.q(0, 0)[i]);
    }
    ASSERT_TRUE(RebuildKeyCodes(batch_.kv().View(), 0, token / 64, 64).ok());
  }
  std::vector<double> KeyOf(int64_t token, int64_t head) {
    std::vector<double> key;
    for (int64_t i = 0; i < 64; ++i) key.push_back(batch_.kv().Get(Key(token, head), i));
    return key;
  }
  // The query head, `distance` positions after the keys that it meets; 0: unchanged.
  std::vector<double> QueryOf(int64_t head, int64_t distance) {
    std::vector<double> query(64);
    for (size_t i = 0; i < 32; ++i) {
      const float* q = batch_.q(0, head);
      const double angle =
          static_cast<double>(distance) * batch_.InverseFrequency(static_cast<int64_t>(i));
      const std::complex<double> turned =
          std::complex<double>(q[i], q[i + 32]) * std::polar(1.0, angle);
      query[i] = turned.real();
      query[i + 32] = turned.imag();
    }
    return query;
  }
  static double Product(const std::vector<double>& q, const std::vector<double>& key) {
    return std::inner_product(q.begin(), q.end(), key.begin(), 0.0);
  }
  // q . k~ as code_logits.h defines it.
  double CodedProduct(const std::vector<double>& q, int64_t token, int64_t kv_head) {
    const PagedKv kv = batch_.kv().View();
    const TokenCodes codes(kv.layout, kv.KeyCodes(0, token / 64, AttentionBatch::kLayer, kv_head),
                           token % 64);
    const double scale = static_cast<float>(*codes.scale), zero = static_cast<float>(*codes.zero);
    double largest = 0, sum = 0;
    for (const double x : q) largest = std::max(largest, std::abs(x));
    for (int64_t i = 0; i < 64; ++i) {
      const double x = q[static_cast<size_t>(i)];
      const double coded = std::rint(x / (largest / 127)) * (largest / 127);
      sum += coded * scale * (KeyCode(codes.words, i) - 7.5) + x * (zero + 7.5 * scale);
    }
    return sum;
  }
  bool IsAttended(int64_t token) const {
    const SelectionHeader& header = selection_.header(0);
    return token < header.sink_end || token >= header.window_begin ||
           (token / 64 == 3 && token % 2 == 0) || (token / 64 == 5 && token % 64 < 16);
  }
  // Weight of a token for a query head in the first tile's row.
  double Weight(int64_t head, int64_t token, bool exact) {
    const SelectionHeader header = selection_.header(head / 2);
    const bool between = token >= header.sink_end && token < header.window_begin;
    const int64_t own_distance =
        QueryPosition(header, kPosition) - (between ? 0 : TokenPosition(header, nullptr, token));
    const int64_t distance = batch_.rope() == nullptr ? 0
                             : between                ? kNumbers.window_tokens
                                                      : own_distance;
    const std::vector<double> q = QueryOf(head, distance);
    return std::exp(
        (exact ? Product(q, KeyOf(token, head / 2)) : CodedProduct(q, token, head / 2)) / 8);
  }
  // Masses of the first block's KV head, by the definition.
  std::array<double, 2> Expected(int64_t kv_head) {
    const std::array<int64_t, 2> heads = {2 * kv_head, 2 * kv_head + 1};
    std::array<double, 2> kept = {}, rest = {};
    std::vector<int64_t> others, heavy;
    for (int64_t t = 0; t <= kPosition; ++t) {
      if (!IsAttended(t)) others.push_back(t);
      for (size_t g = 0; g < 2 && IsAttended(t); ++g) kept[g] += Weight(heads[g], t, true);
    }
    const auto add = [&](int64_t token, bool exact) {
      for (size_t g = 0; g < 2; ++g) rest[g] += Weight(heads[g], token, exact);
    };
    num_heavy_ = 0;
    for (int64_t page = 0; page <= kPosition / 64; ++page) {
      const std::array<double, 2> known = {kept[0] + rest[0], kept[1] + rest[1]};
      for (const int64_t t : others) {
        if (t / 64 != page) continue;
        const bool is_heavy = Weight(heads[0], t, false) > known[0] / 256 ||
                              Weight(heads[1], t, false) > known[1] / 256;
        num_heavy_ += is_heavy;
        if (is_heavy) {
          heavy.push_back(t);
        } else {
          add(t, false);
        }
      }
      if (heavy.size() < 64 && page < kPosition / 64) continue;
      for (const int64_t t : heavy) add(t, true);
      heavy.clear();
    }
    return {kept[0] / (kept[0] + rest[0]), kept[1] / (kept[1] + rest[1])};
  }
  void ExpectTheDefinition() {
    for (int64_t head = 0; head < 2; ++head) {
      const std::array<double, 2> expected = Expected(head);
      EXPECT_GT(num_heavy_, 0);
      EXPECT_LT(num_heavy_, 300);
      for (int64_t g = 0; g < 2; ++g) {
        EXPECT_NEAR(mass(head, g), expected[static_cast<size_t>(g)], 1e-5);
        EXPECT_GT(mass(head, g), 0.2);
        EXPECT_LT(mass(head, g), 0.9);
      }
    }
  }

  AttentionBatch batch_{{.head_dim = 64}, 1, kContext, 5};
  SerialExecutor executor_;
  PageSelection selection_;
  std::vector<float> mass_ = std::vector<float>(12, -1);
  int64_t num_heavy_ = 0;  // of the last Expected
};

TEST_F(MassEstimateTest, IsTheShareOfWhatIsAttendedTo) {
  ASSERT_TRUE(Estimate().ok());
  ExpectTheDefinition();
}

TEST_F(MassEstimateTest, UnrotatedCandidatesStandAtOneDistance) {
  batch_.UseCompactPositions();
  ASSERT_TRUE(Estimate().ok());
  ExpectTheDefinition();
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

// Keys change, and their codes stay.
TEST_F(MassEstimateTest, ReadsKeysOfWhatIsAttendedToOrHeavyAndCodesOfTheRest) {
  const int64_t light = 3 * 64 + 1, attended = 3 * 64 + 2, heavy = 9 * 64;
  SetKey(light, 0);
  SetKey(heavy, 1);
  ASSERT_TRUE(Estimate().ok());
  std::vector<float> before = mass_;
  batch_.kv().Set(Key(light, 0), 0, 100);
  ASSERT_TRUE(Estimate().ok());
  EXPECT_EQ(mass(0, 0), before[0]);
  for (const int64_t token : {attended, heavy}) {
    batch_.kv().Set(Key(token, 0), 0, 100);
    ASSERT_TRUE(Estimate().ok());
    EXPECT_NE(mass(0, 0), before[0]) << token;
    EXPECT_EQ(mass(1, 0), before[2]) << "the other KV head has keys of its own";
    before = mass_;
  }
}

// If one token has two thirds of the weight, an error of its code would be an error of the mass.
TEST_F(MassEstimateTest, OneTokenDoesNotSpoilTheEstimate) {
  SetKey(9 * 64, 1.15f);
  ASSERT_TRUE(Estimate().ok());
  double kept = 0, all = 0, coded = 0;
  for (int64_t t = 0; t <= kPosition; ++t) {
    const double weight = Weight(0, t, true);
    all += weight;
    if (IsAttended(t)) kept += weight;
    if (t == 9 * 64) coded = Weight(0, t, false) - weight;
  }
  ASSERT_GT(std::abs(kept / all - kept / (all + coded)), 0.004);
  EXPECT_NEAR(mass(0, 0), kept / all, 0.002);
}

TEST_F(MassEstimateTest, AnAbsentPageIsAFault) {
  batch_.kv().SetTier(0, 5, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(Estimate().ok());
  EXPECT_EQ(batch_.fault(0), 1);
}

TEST_F(MassEstimateTest, APageOfWhichNothingIsReadMayBeAbsent) {
  for (int64_t t = 0; t < 64; ++t) SetKey(6 * 64 + t, 0);
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
    SetKey(token, factor);
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
  const std::vector<PolicyNumbers> numbers(3, kNumbers);
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
