// Codes of quantized KV, from their definition in kv_codes.h, and the forms that decode them.
#include "kernels/paged/quantized_kv.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

#include "kernels/append/append.h"
#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/paged/kv_codes.h"
#include "kernels/paged/page_selection.h"
#include "tests/support/cpu_forms.h"
#include "tests/support/fake_paged_kv.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class QuantizedKvTest : public ::testing::TestWithParam<DType> {
 protected:
  static float LargestCode() { return GetParam() == DType::kInt8 ? kInt8Max : kFloat8Max; }
  // The numbers that codes stand for, ascending, as IEEE 754 and two's complement define them.
  static std::vector<float> Numbers() {
    std::vector<float> numbers;
    if (GetParam() == DType::kInt8) {
      for (int i = -127; i <= 127; ++i) numbers.push_back(static_cast<float>(i));
      return numbers;
    }
    for (int exponent = 0; exponent < 16; ++exponent) {
      for (int mantissa = 0; mantissa < 8; ++mantissa) {
        if (exponent == 15 && mantissa == 7) continue;  // NaN
        const float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
        numbers.push_back(x);
        if (x != 0) numbers.push_back(-x);
      }
    }
    std::sort(numbers.begin(), numbers.end());
    return numbers;
  }
  static KvLayout Layout(int64_t head_dim) {
    return {.num_layers = 2, .num_kv_heads = 2, .head_dim = head_dim, .dtype = GetParam()};
  }
  struct Token {
    std::vector<std::byte> codes;
    std::byte scale;
    std::vector<float> decoded;
  };
  static Token RoundTrip(const std::vector<float>& elements) {
    Token token = {.codes = std::vector<std::byte>(elements.size()), .scale = {}, .decoded = {}};
    QuantizeToken(GetParam(), elements.data(), std::ssize(elements), token.codes.data(),
                  &token.scale);
    std::vector<BFloat16> decoded(elements.size());
    DequantizeToken(Layout(std::ssize(elements)), token.codes.data(), &token.scale, decoded.data());
    for (const BFloat16 x : decoded) token.decoded.push_back(static_cast<float>(x));
    return token;
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, QuantizedKvTest,
                         ::testing::Values(DType::kFloat8E4M3, DType::kInt8),
                         [](const auto& param) {
                           return std::string(DTypeName(param.param).data());
                         });

TEST_P(QuantizedKvTest, EveryNumberIsItsOwnCode) {
  for (const float x : Numbers()) {
    // Beside the largest number the scale is 1.
    const Token token = RoundTrip({LargestCode(), x});
    EXPECT_EQ(token.scale, std::byte{kScaleBias});
    EXPECT_EQ(token.decoded[1], x);
    EXPECT_EQ(DecodeElement(GetParam(), std::to_integer<uint8_t>(token.codes[1])), x);
  }
}

TEST_P(QuantizedKvTest, RoundsToTheNearestNumberAndTiesToEven) {
  const std::vector<float> numbers = Numbers();
  for (size_t i = 0; i + 1 < numbers.size(); ++i) {
    const float middle = (numbers[i] + numbers[i + 1]) / 2;
    const float below = std::nextafter(middle, -kInfinity);
    const float above = std::nextafter(middle, kInfinity);
    const Token token = RoundTrip({LargestCode(), below, middle, above});
    EXPECT_EQ(token.decoded[1], numbers[i]);
    EXPECT_EQ(token.decoded[3], numbers[i + 1]);
    EXPECT_TRUE(token.decoded[2] == numbers[i] || token.decoded[2] == numbers[i + 1]);
    EXPECT_EQ(std::to_integer<int>(token.codes[2]) % 2, 0) << middle;
  }
}

TEST_P(QuantizedKvTest, TheScaleIsTheLeastThatClipsNothing) {
  for (int power = -100; power <= 100; ++power) {
    const float scale = std::ldexp(1.0f, power);
    const float largest = LargestCode() * scale;
    EXPECT_EQ(ScaleOf(GetParam(), largest), kScaleBias + power);
    EXPECT_EQ(ScaleOf(GetParam(), std::nextafter(largest, kInfinity)), kScaleBias + power + 1);
    EXPECT_EQ(RoundTrip({0.0f, -largest}).decoded[1], -largest);
  }
}

TEST_P(QuantizedKvTest, HostileTokens) {
  EXPECT_EQ(RoundTrip({0, -0.0f, 0}).decoded, std::vector<float>(3));
  for (const float bad : {kNan, kInfinity, -kInfinity, 0x1p127f, -0x1.8p127f}) {
    for (const size_t at : {size_t{0}, size_t{2}, size_t{9}}) {
      std::vector<float> token(10, 1.0f);
      token[at] = bad;
      const Token found = RoundTrip(token);
      EXPECT_EQ(found.scale, std::byte{kNanScale});
      for (const float x : found.decoded) EXPECT_TRUE(std::isnan(x));
    }
  }
  const float largest = std::nextafter(0x1p127f, 0.0f);
  EXPECT_EQ(RoundTrip({largest, -largest}).decoded, (std::vector<float>{0x1p127f, -0x1p127f}));
  // Denormal numbers are below the least code.
  for (const float x : RoundTrip({1e-40f, -3e-39f, 1e-45f}).decoded) EXPECT_EQ(x, 0.0f);
  EXPECT_EQ(RoundTrip({0x1p-110f}).decoded[0], 0x1p-110f);
  // An outlier takes the precision of its token's other elements, and of no other token.
  const Token beside = RoundTrip({1e6f, 1.0f});
  EXPECT_NEAR(beside.decoded[0], 1e6f, 1e6f / 16);
  EXPECT_LE(std::abs(beside.decoded[1] - 1.0f), 1.0f);
}

TEST_P(QuantizedKvTest, ErrorsAreWithinHalfAStep) {
  std::mt19937_64 rng(5);
  std::normal_distribution<float> normal;
  for (const float size : {1e-20f, 1e-3f, 1.0f, 3000.0f, 1e20f}) {
    std::vector<float> token(128);
    for (float& x : token) x = size * normal(rng);
    const Token found = RoundTrip(token);
    const float scale = PowerOfTwo(std::to_integer<int>(found.scale) - kScaleBias);
    for (size_t i = 0; i < token.size(); ++i) {
      const float half_step = GetParam() == DType::kInt8
                                  ? scale / 2
                                  : std::max(std::abs(token[i]) / 16, scale * 0x1p-10f);
      EXPECT_LE(std::abs(found.decoded[i] - token[i]), half_step);
      EXPECT_EQ(static_cast<float>(BFloat16(found.decoded[i])), found.decoded[i]);
    }
  }
}

// All codes with all scales: every form decodes the wanted tokens to the same bits.
TEST_P(QuantizedKvTest, AllFormsGiveTheSameBitsAndLeaveOtherTokens) {
  for (const int64_t d : {1, 7, 8, 24, 64, 80, 128}) {
    for (int first_scale = 0; first_scale < 256; first_scale += 64) {
      std::vector<uint8_t> codes(static_cast<size_t>(64 * d)), scales(64);
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 + i / 256);
      for (size_t i = 0; i < 64; ++i) scales[i] = static_cast<uint8_t>(first_scale + int(i));
      // Scales that no token has: they would leave the range of bfloat16.
      for (uint8_t& scale : scales) {
        if (scale != kNanScale && (scale < kLeastScale || scale > 240)) scale = 130;
      }
      const uint64_t mask = 0xf3c1'0000'ffff'8001;
      const auto run = [&](DequantizeFn* form) {
        std::vector<uint16_t> to(codes.size(), 0x1234);
        form({.codes = codes.data(),
              .scales = scales.data(),
              .is_int8 = GetParam() == DType::kInt8,
              .head_dim = d,
              .mask = mask,
              .next = codes.data(),
              .to = to.data()});
        return to;
      };
      const std::vector<uint16_t> expected = run(DequantizePlain);
      for (int64_t i = 0; i < 64 * d; ++i) {
        if ((mask >> (i / d) & 1) == 0) {
          EXPECT_EQ(expected[static_cast<size_t>(i)], 0x1234);
        }
      }
      tests::ForEachVectorForm(kDequantizeForms,
                               [&](DequantizeFn* form) { EXPECT_EQ(run(form), expected); });
    }
  }
}

// Two appends of the same tokens, cut differently. An outlier and a NaN come last.
TEST_P(QuantizedKvTest, APageHasTheSameBytesHoweverItsTokensArrive) {
  constexpr int64_t kDim = 24, kTokens = 70;
  std::mt19937_64 rng(6);
  std::normal_distribution<float> normal;
  std::vector<float> k(kTokens * 2 * kDim), v(k.size());
  for (float& x : k) x = normal(rng);
  for (float& x : v) x = normal(rng);
  k[60 * 2 * kDim + 3] = 1e9f;
  v[63 * 2 * kDim + 5] = kNan;
  const auto append = [&](FakePagedKv& kv, int64_t chunk) {
    kv.Grow(0, kTokens);
    SerialExecutor executor;
    for (int64_t first = 0; first < kTokens;) {
      const int64_t count = std::min({chunk, kTokens - first, kPageTokens - first % kPageTokens});
      const QueryTile tile = {
          .slot = 0, .first_row = first, .num_rows = count, .first_position = first};
      ASSERT_TRUE(AppendKv({.k = TensorView(k.data(), DType::kFloat32, {kTokens, 2, kDim}),
                            .v = TensorView(v.data(), DType::kFloat32, {kTokens, 2, kDim}),
                            .kv = kv.View(),
                            .layer = 1,
                            .tiles = {&tile, 1}},
                           executor)
                      .ok());
      first += count;
    }
  };
  FakePagedKv whole(Layout(kDim), 1, 2), single(Layout(kDim), 1, 2);
  append(whole, 64);
  append(single, 1);
  const KvLayout layout = Layout(kDim);
  const auto bytes = [](const std::byte* p, int64_t n) { return std::vector(p, p + n); };
  for (int64_t block = 0; block < 2; ++block) {
    for (int64_t head = 0; head < 2; ++head) {
      const PagedKv a = whole.View(), b = single.View();
      EXPECT_EQ(bytes(a.Peek(0, block, 1, head).page(), layout.page_bytes()),
                bytes(b.Peek(0, block, 1, head).page(), layout.page_bytes()));
      EXPECT_EQ(bytes(a.Bounds(0, block, 1, head), layout.page_bounds_bytes()),
                bytes(b.Bounds(0, block, 1, head), layout.page_bounds_bytes()));
      EXPECT_EQ(bytes(a.KeyCodes(0, block, 1, head), layout.page_key_codes_bytes()),
                bytes(b.KeyCodes(0, block, 1, head), layout.page_key_codes_bytes()));
    }
  }
  EXPECT_TRUE(std::isnan(whole.Elements(Side::kValue, 0, 63, 1, 0)[0]));
  EXPECT_FALSE(std::isnan(whole.Elements(Side::kKey, 0, 63, 1, 0)[0]));
}

// Bounds and key codes are those of bfloat16 KV that holds the decoded keys, made when tokens are
// appended and when they are rebuilt.
TEST_P(QuantizedKvTest, DigestsAreThoseOfTheDecodedKeys) {
  constexpr int64_t kDim = 16, kTokens = 50;
  std::mt19937_64 rng(7);
  std::normal_distribution<float> normal;
  std::vector<float> k(kTokens * 2 * kDim);
  for (float& x : k) x = 3 * normal(rng);
  FakePagedKv quantized(Layout(kDim), 1, 1),
      decoded({.num_layers = 2, .num_kv_heads = 2, .head_dim = kDim, .dtype = DType::kBFloat16}, 1,
              1);
  quantized.Grow(0, kTokens);
  decoded.Grow(0, kTokens);
  SerialExecutor executor;
  const QueryTile tile = {.slot = 0, .first_row = 0, .num_rows = kTokens, .first_position = 0};
  const TensorView rows(k.data(), DType::kFloat32, {kTokens, 2, kDim});
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(
        AppendKv(
            {.k = rows, .v = rows, .kv = quantized.View(), .layer = layer, .tiles = {&tile, 1}},
            executor)
            .ok());
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t t = 0; t < kTokens; ++t) {
        decoded.SetToken(Side::kKey, 0, t, layer, head,
                         quantized.Elements(Side::kKey, 0, t, layer, head));
      }
    }
  }
  ASSERT_TRUE(RebuildBounds(decoded.View(), 0, 0, kTokens).ok());
  ASSERT_TRUE(RebuildKeyCodes(decoded.View(), 0, 0, kTokens).ok());
  const auto digests = [&](FakePagedKv& kv) {
    const KvLayout& layout = kv.layout();
    const std::byte* bounds = kv.View().Bounds(0, 0, 0, 0);
    std::vector<std::byte> all(bounds, bounds + layout.block_bounds_bytes());
    std::vector<float> key(kDim);
    for (int64_t t = 0; t < kTokens; ++t) {
      DecodeKey(layout, kv.View().KeyCodes(0, 0, 1, 1), t, key.data());
      const auto* begin = reinterpret_cast<const std::byte*>(key.data());
      all.insert(all.end(), begin, begin + kDim * 4);
    }
    return all;
  };
  EXPECT_EQ(digests(quantized), digests(decoded));
  const std::vector<std::byte> appended = digests(quantized);
  ASSERT_TRUE(RebuildBounds(quantized.View(), 0, 0, kTokens).ok());
  ASSERT_TRUE(RebuildKeyCodes(quantized.View(), 0, 0, kTokens).ok());
  EXPECT_EQ(digests(quantized), appended);
}

TEST_P(QuantizedKvTest, APageTakesHalfOfABFloat16Page) {
  const KvLayout wide = {
      .num_layers = 1, .num_kv_heads = 1, .head_dim = 128, .dtype = DType::kBFloat16};
  KvLayout layout = wide;
  layout.dtype = GetParam();
  EXPECT_EQ(layout.page_bytes(), wide.page_bytes() / 2 + 128);
  EXPECT_EQ(layout.page_bounds_bytes(), wide.page_bounds_bytes());
}

}  // namespace
}  // namespace kvasir::kernels
