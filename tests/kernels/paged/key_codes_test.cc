#include "kernels/append/key_codes.h"

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

#include "kernels/append/append.h"
#include "kernels/base/float16.h"
#include "tests/support/fake_paged_kv.h"

namespace kvasir::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class KeyCodesTest : public ::testing::TestWithParam<DType> {
 protected:
  static KvLayout Layout(int64_t head_dim) {
    return {.num_layers = 2, .num_kv_heads = 2, .head_dim = head_dim, .dtype = GetParam()};
  }
  // Codes and decodes one key at the token's place, in a page whose other bytes are poison.
  std::vector<float> RoundTrip(const std::vector<float>& key, int64_t token = 63) {
    const KvLayout layout = Layout(std::ssize(key));
    codes_ = HostBuffer::Allocate(layout.page_key_codes_bytes()).value();
    std::memset(codes_.data(), 0xff, static_cast<size_t>(codes_.size_bytes()));
    std::vector<std::byte> cached(static_cast<size_t>(layout.row_bytes()));
    for (size_t i = 0; i < key.size(); ++i) {
      if (GetParam() == DType::kFloat32) {
        reinterpret_cast<float*>(cached.data())[i] = key[i];
      } else {
        reinterpret_cast<BFloat16*>(cached.data())[i] = BFloat16(key[i]);
      }
    }
    EncodeKeys(layout, cached.data(), token, 1, codes_.data());
    std::vector<float> decoded(key.size());
    DecodeKey(layout, codes_.data(), token, decoded.data());
    return decoded;
  }
  float Cached(float x) const {
    return GetParam() == DType::kFloat32 ? x : static_cast<float>(BFloat16(x));
  }

  HostBuffer codes_;
};

INSTANTIATE_TEST_SUITE_P(KvDtypes, KeyCodesTest,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& param) {
                           return std::string(DTypeName(param.param).data());
                         });

TEST_P(KeyCodesTest, NoElementIsFurtherOffThanHalfAStep) {
  std::mt19937_64 rng(3);
  std::normal_distribution<float> normal;
  for (const int64_t d : {1, 7, 8, 16, 80, 128}) {
    for (const float size : {1e-6f, 1.0f, 3000.0f}) {
      for (const float offset : {0.0f, 5.0f, -1.0f}) {
        std::vector<float> key(static_cast<size_t>(d));
        for (float& x : key) x = Cached(size * (normal(rng) + offset));
        const std::vector<float> decoded = RoundTrip(key);
        const auto [min, max] = std::minmax_element(key.begin(), key.end());
        const float step = (*max - *min) / 15;
        for (size_t i = 0; i < key.size(); ++i) {
          // Zero and scale are float16: 11 bits, or 2^-24 when they are denormal.
          const float rounding = std::abs(*min) / 2048 + std::abs(*max - *min) / 1024 + 0x1p-23f;
          EXPECT_NEAR(decoded[i], key[i], step / 2 + rounding) << "d " << d << " size " << size;
        }
      }
    }
  }
}

TEST_P(KeyCodesTest, NumbersOnTheGridAreExact) {
  std::vector<float> key;
  for (int i = 0; i < 16; ++i) key.push_back(-4.0f + 0.5f * static_cast<float>((i * 7) % 16));
  EXPECT_EQ(RoundTrip(key, 0), key);
  EXPECT_EQ(RoundTrip(key, 63), key);
}

// A word holds the elements 0, 2, 4, 6, 1, 3, 5, 7, from its lowest nibble on.
TEST_P(KeyCodesTest, NibblesLieAsDocumented) {
  RoundTrip({0, 15, 2, 3, 4, 5, 6, 7}, 5);
  EXPECT_EQ(codes_.As<uint32_t>()[5], 0x753f6420u);
  const Float16* scales = reinterpret_cast<const Float16*>(codes_.data() + 64 * 4);
  EXPECT_EQ(static_cast<float>(scales[5]), 1.0f);
  EXPECT_EQ(static_cast<float>(scales[64 + 5]), 0.0f);
  EXPECT_EQ(Layout(8).page_key_codes_bytes(), 64 * 8);
  EXPECT_EQ(Layout(128).page_key_codes_bytes(), 64 * 68);
}

TEST_P(KeyCodesTest, EqualElementsAndHugeOnes) {
  EXPECT_EQ(RoundTrip(std::vector<float>(16)), std::vector<float>(16));
  EXPECT_EQ(RoundTrip(std::vector<float>(16, -2.5f)), std::vector<float>(16, -2.5f));
  std::vector<float> key(16, 1.0f);
  key[3] = 1e30f;
  key[4] = -kInfinity;
  const std::vector<float> decoded = RoundTrip(key);
  EXPECT_NEAR(decoded[3], kFloat16Max, 70);
  EXPECT_EQ(decoded[4], -kFloat16Max);
  for (const float x : decoded) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(KeyCodesTest, ANanElementMakesTheKeyNan) {
  for (const size_t at : {size_t{0}, size_t{5}, size_t{15}}) {
    std::vector<float> key(16, 1.0f);
    key[2] = 3.0f;
    key[at] = kNan;
    for (const float x : RoundTrip(key)) EXPECT_TRUE(std::isnan(x));
  }
}

TEST_P(KeyCodesTest, AppendingCodesWhatItCaches) {
  constexpr int64_t kDim = 16, kTokens = 100;
  FakePagedKv kv(Layout(kDim), /*num_slots=*/1, /*max_blocks_per_slot=*/2);
  kv.Grow(0, kTokens);
  std::mt19937_64 rng(4);
  std::normal_distribution<float> normal;
  std::vector<float> k(size_t{kTokens * 2 * kDim}), v(k.size());
  for (float& x : k) x = normal(rng);
  const TensorView keys(k.data(), DType::kFloat32, {kTokens, 2, kDim});
  const TensorView values(v.data(), DType::kFloat32, {kTokens, 2, kDim});
  const std::vector<QueryTile> tiles = {{.num_rows = 50},
                                        {.first_row = 50, .num_rows = 14, .first_position = 50},
                                        {.first_row = 64, .num_rows = 36, .first_position = 64}};
  SerialExecutor executor;
  ASSERT_TRUE(
      AppendKv({.k = keys, .v = values, .kv = kv.View(), .layer = 1, .tiles = tiles}, executor)
          .ok());
  const auto snapshot = [&] {
    std::vector<float> all;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t head = 0; head < 2; ++head) {
        std::vector<float> key(kDim);
        DecodeKey(kv.layout(), kv.View().KeyCodes(0, t / 64, 1, head), t % 64, key.data());
        all.insert(all.end(), key.begin(), key.end());
      }
    }
    return all;
  };
  const std::vector<float> appended = snapshot();
  for (size_t i = 0; i < k.size(); ++i) EXPECT_NEAR(appended[i], k[i], 0.3f);
  for (int64_t head = 0; head < 2; ++head) {
    std::memset(kv.View().KeyCodes(0, 0, 1, head), 0, 100);
  }
  ASSERT_NE(snapshot(), appended);
  // Layer 0 was never written: its keys are poison, and so are their codes.
  ASSERT_TRUE(RebuildKeyCodes(kv.View(), 0, 0, 64).ok());
  ASSERT_TRUE(RebuildKeyCodes(kv.View(), 0, 1, 36).ok());
  EXPECT_EQ(snapshot(), appended);
}

TEST_P(KeyCodesTest, RebuildingRefusesWhatIsNotThere) {
  FakePagedKv kv(Layout(16), 1, 2);
  kv.Grow(0, 64);
  EXPECT_EQ(RebuildKeyCodes(kv.View(), 0, 1, 64).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(RebuildKeyCodes(kv.View(), 1, 0, 64).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RebuildKeyCodes(kv.View(), 0, 0, 65).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
