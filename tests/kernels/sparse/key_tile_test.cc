#include "kernels/sparse/key_logits/key_tile.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

#include "kernels/append/key_code_math.h"
#include "kernels/append/key_codes.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kHeadDims[] = {2, 7, 8, 16, 17, 34, 64, 80, 128, 256};

// The forms beside the reference that this machine can run.
std::vector<const KeyTileFunctions*> Forms() {
  std::vector<const KeyTileFunctions*> forms;
  if (CpuHas(CpuIsa::kNeon)) forms.push_back(KVASIR_ON_ARM(&kKeyTileNeon));
  if (CpuHas(CpuIsa::kAvx2)) forms.push_back(KVASIR_ON_X86(&kKeyTileAvx2));
  if (CpuHas(CpuIsa::kAvx512)) forms.push_back(KVASIR_ON_X86(&kKeyTileAvx512));
  return forms;
}

// The same bits, any NaN for a NaN.
void ExpectSame(const std::vector<float>& found, const std::vector<float>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::isnan(found[i]) && std::isnan(expected[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]))
        << found[i] << " is not " << expected[i] << ", at " << i;
  }
}

// Normal numbers with all that floats can be among them.
class HostileRandom {
 public:
  float Next() {
    constexpr float kRare[] = {kNan, kInfinity, -kInfinity, 0.0f, -0.0f, 1e-40f, 3e38f};
    return rng_() % 97 == 0 ? kRare[rng_() % std::size(kRare)] : normal_(rng_);
  }
  std::vector<float> Many(int64_t count) {
    std::vector<float> all(static_cast<size_t>(count));
    for (float& x : all) x = Next();
    return all;
  }
  uint64_t Bits() { return rng_(); }

 private:
  std::mt19937_64 rng_{83};
  std::normal_distribution<float> normal_;
};

std::vector<float> EmptyTile(int64_t head_dim) {
  return std::vector<float>(static_cast<size_t>(head_dim * kTileKeys), 7.0f);
}

// Keys in memory of their own each, some of them missing.
template <typename T>
struct Rows {
  Rows(int64_t row_size, const std::function<T()>& next) {
    for (int64_t t = 0; t < kTileKeys; ++t) {
      auto& row = memory.emplace_back(static_cast<size_t>(row_size));
      for (T& x : row) x = next();
      pointers.push_back(t % 13 == 5 ? nullptr : row.data());
    }
  }
  std::vector<std::vector<T>> memory;
  std::vector<const void*> pointers;
};

TEST(KeyTile, PacksKeysAlikeInAllForms) {
  HostileRandom random;
  for (const int64_t d : kHeadDims) {
    const Rows<float> floats(d, [&] { return random.Next(); });
    const Rows<BFloat16> halves(d, [&] { return BFloat16(random.Next()); });
    std::vector<float> float_tile = EmptyTile(d), half_tile = EmptyTile(d);
    kKeyTilePlain.pack_float32(floats.pointers.data(), d, float_tile.data());
    kKeyTilePlain.pack_bfloat16(halves.pointers.data(), d, half_tile.data());
    EXPECT_EQ(float_tile[5], 0.0f) << "a missing key";
    EXPECT_EQ(half_tile[kTileKeys + 3], static_cast<float>(halves.memory[3][1]));
    for (const KeyTileFunctions* form : Forms()) {
      SCOPED_TRACE(testing::Message() << "head_dim " << d);
      std::vector<float> tile = EmptyTile(d);
      form->pack_float32(floats.pointers.data(), d, tile.data());
      ExpectSame(tile, float_tile);
      tile = EmptyTile(d);
      form->pack_bfloat16(halves.pointers.data(), d, tile.data());
      ExpectSame(tile, half_tile);
    }
  }
}

// Codes of a page, some keys with NaN or all alike, against DecodeKey.
TEST(KeyTile, PacksCodesAsTheyDecode) {
  HostileRandom random;
  for (const int64_t d : kHeadDims) {
    const KvLayout layout = {
        .num_layers = 1, .num_kv_heads = 1, .head_dim = d, .dtype = DType::kFloat32};
    std::vector<float> keys = random.Many(kTileKeys * d);
    std::fill_n(keys.begin() + 3 * d, d, -1.5f);
    std::vector<std::byte> page(static_cast<size_t>(layout.page_key_codes_bytes()));
    EncodeKeys(layout, reinterpret_cast<const std::byte*>(keys.data()), 0, kTileKeys, page.data());
    CodedKeys coded;
    std::vector<float> expected = EmptyTile(d), key(static_cast<size_t>(d));
    for (int64_t t = 0; t < kTileKeys; ++t) {
      const TokenCodes codes(layout, page.data(), t);
      coded.words[t] = t == 9 ? nullptr : codes.words;
      coded.scales[t] = static_cast<float>(*codes.scale);
      coded.zeros[t] = static_cast<float>(*codes.zero);
      DecodeKey(layout, page.data(), t, key.data());
      for (int64_t i = 0; i < d; ++i) {
        expected[static_cast<size_t>(i * kTileKeys + t)] =
            t == 9 ? coded.zeros[t] : key[static_cast<size_t>(i)];
      }
    }
    std::vector<float> tile = EmptyTile(d);
    kKeyTilePlain.pack_codes(coded, d, tile.data());
    ExpectSame(tile, expected);
    for (const KeyTileFunctions* form : Forms()) {
      SCOPED_TRACE(testing::Message() << "head_dim " << d);
      tile = EmptyTile(d);
      form->pack_codes(coded, d, tile.data());
      ExpectSame(tile, expected);
    }
  }
}

// Every key to a position of its own, against RopePositions.
TEST(KeyTile, RotatesAsApplyRopeDoes) {
  HostileRandom random;
  SerialExecutor executor;
  for (const int64_t d : {2, 16, 34, 64, 128}) {
    const std::vector<double> frequencies(static_cast<size_t>(d / 2), 0.37);
    RopePositions rope(frequencies, 1.1);
    rope.Reserve(1000, executor);
    const std::vector<float> before = random.Many(d * kTileKeys);
    std::vector<float> expected = before, key(static_cast<size_t>(d));
    std::vector<const void*> cos, sin;
    for (int64_t t = 0; t < kTileKeys; ++t) {
      const int64_t position = 7 * t % 999;
      cos.push_back(rope.cos(position));
      sin.push_back(rope.sin(position));
      for (int64_t i = 0; i < d; ++i) {
        key[static_cast<size_t>(i)] = before[static_cast<size_t>(i * kTileKeys + t)];
      }
      rope.Rotate(key.data(), DType::kFloat32, 1, position);
      for (int64_t i = 0; i < d; ++i) {
        expected[static_cast<size_t>(i * kTileKeys + t)] = key[static_cast<size_t>(i)];
      }
    }
    std::vector<const KeyTileFunctions*> forms = Forms();
    forms.push_back(&kKeyTilePlain);
    for (const KeyTileFunctions* form : forms) {
      SCOPED_TRACE(testing::Message() << "head_dim " << d);
      std::vector<float> tile = before, cos_tile = EmptyTile(d / 2), sin_tile = EmptyTile(d / 2);
      form->pack_float32(cos.data(), d / 2, cos_tile.data());
      form->pack_float32(sin.data(), d / 2, sin_tile.data());
      form->rotate(cos_tile.data(), sin_tile.data(), d, tile.data());
      ExpectSame(tile, expected);
    }
  }
}

TEST(KeyTile, LogitsHaveTheSameBitsInAllFormsAndAmongAnyNumberOfQueries) {
  HostileRandom random;
  for (const int64_t d : kHeadDims) {
    const std::vector<float> tile = random.Many(d * kTileKeys);
    for (const int64_t queries : {1, 2, 3, 5, 6, 7, 8, 13, 64}) {
      SCOPED_TRACE(testing::Message() << "head_dim " << d << ", queries " << queries);
      const std::vector<float> q = random.Many(queries * d);
      std::vector<float> expected(static_cast<size_t>(queries * kTileKeys));
      std::vector<float> best(kTileKeys), found = expected, found_best = best;
      const TileQueries params = {.queries = q.data(), .count = queries, .head_dim = d};
      kKeyTilePlain.logits(params, tile.data(), expected.data());
      kKeyTilePlain.best(params, tile.data(), best.data());
      for (const KeyTileFunctions* form : Forms()) {
        form->logits(params, tile.data(), found.data());
        ExpectSame(found, expected);
        form->best(params, tile.data(), found_best.data());
        ExpectSame(found_best, best);
      }
    }
  }
}

// A page as it lies, against its tile.
TEST(KeyTile, LogitsOfAPageOfKeysHaveTheBitsOfATile) {
  HostileRandom random;
  for (const int64_t d : kHeadDims) {
    const std::vector<float> floats = random.Many(d * kTileKeys);
    std::vector<BFloat16> halves;
    for (const float x : random.Many(d * kTileKeys)) halves.push_back(BFloat16(x));
    std::vector<const void*> float_keys, half_keys;
    for (int64_t t = 0; t < kTileKeys; ++t) {
      float_keys.push_back(floats.data() + t * d);
      half_keys.push_back(halves.data() + t * d);
    }
    std::vector<float> float_tile = EmptyTile(d), half_tile = EmptyTile(d);
    kKeyTilePlain.pack_float32(float_keys.data(), d, float_tile.data());
    kKeyTilePlain.pack_bfloat16(half_keys.data(), d, half_tile.data());
    const auto* float_bytes = reinterpret_cast<const std::byte*>(floats.data());
    const auto* half_bytes = reinterpret_cast<const std::byte*>(halves.data());
    std::vector<const KeyTileFunctions*> forms = Forms();
    forms.push_back(&kKeyTilePlain);
    for (const int64_t queries : {1, 2, 3, 4, 5, 7, 8}) {
      SCOPED_TRACE(testing::Message() << "head_dim " << d << ", queries " << queries);
      const std::vector<float> q = random.Many(queries * d);
      std::vector<float> expected(static_cast<size_t>(queries * kTileKeys)), found = expected;
      const TileQueries params = {.queries = q.data(), .count = queries, .head_dim = d};
      for (const KeyTileFunctions* form : forms) {
        kKeyTilePlain.logits(params, float_tile.data(), expected.data());
        form->key_logits_float32({.keys = float_bytes}, params, found.data());
        ExpectSame(found, expected);
        kKeyTilePlain.logits(params, half_tile.data(), expected.data());
        form->key_logits_bfloat16({.keys = half_bytes, .next_keys = half_bytes}, params,
                                  found.data());
        ExpectSame(found, expected);
      }
    }
  }
}

TEST(KeyTile, TheReferenceIsTheSumAndItsBestLeavesOutNan) {
  std::mt19937_64 rng(84);
  std::normal_distribution<float> normal;
  constexpr int64_t kDim = 48, kQueries = 3;
  std::vector<float> tile(kDim * kTileKeys), q(kQueries * kDim), logits(kQueries * kTileKeys);
  for (float& x : tile) x = normal(rng);
  for (float& x : q) x = normal(rng);
  q[kDim] = kNan;                                                                      // query 1
  for (int i = 0; i < kDim; ++i) tile[static_cast<size_t>(i) * kTileKeys + 5] = kNan;  // key 5
  float best[kTileKeys];
  const TileQueries params = {.queries = q.data(), .count = kQueries, .head_dim = kDim};
  kKeyTilePlain.logits(params, tile.data(), logits.data());
  kKeyTilePlain.best(params, tile.data(), best);
  for (size_t t = 0; t < kTileKeys; ++t) {
    double largest = -std::numeric_limits<double>::infinity();
    for (size_t query = 0; query < kQueries; ++query) {
      double sum = 0;
      for (size_t i = 0; i < kDim; ++i) {
        sum += double{q[query * kDim + i]} * double{tile[i * kTileKeys + t]};
      }
      if (sum > largest) largest = sum;
      const float found = logits[query * kTileKeys + t];
      if (std::isnan(sum)) {
        EXPECT_TRUE(std::isnan(found)) << query << ", " << t;
      } else {
        EXPECT_NEAR(found, sum, 1e-5);
      }
    }
    if (t == 5) {
      EXPECT_EQ(best[t], -kInfinity);
    } else {
      EXPECT_NEAR(best[t], largest, 1e-5);
    }
  }
}

// Codes of a page and of queries, all numbers that their fields can hold.
struct CodedProduct {
  CodedProduct(int64_t num_words, int64_t count, HostileRandom& random) {
    const auto bits = [&](int64_t n) {
      std::vector<uint32_t> all(static_cast<size_t>(n));
      for (uint32_t& x : all) x = static_cast<uint32_t>(random.Bits());
      return all;
    };
    words = bits(kTileKeys * num_words);
    quads = bits(count * 2 * num_words);
    for (uint32_t& quad : quads) {
      for (int i = 0; i < 4; ++i) {
        if ((quad >> (8 * i) & 255) == 128) quad ^= 1u << (8 * i);  // -128 is no code
      }
    }
    for (const uint32_t x : bits(kTileKeys)) {
      scales.push_back(static_cast<uint16_t>(x & 0x7fff));
      zeros.push_back(static_cast<uint16_t>(x >> 16));
    }
    steps = random.Many(count);
    sums = random.Many(count);
    for (const uint32_t x : bits(count)) code_sums.push_back(static_cast<int32_t>(x % 30000));
    page = {.words = words.data(), .scales = scales.data(), .zeros = zeros.data()};
    queries = {.quads = quads.data(),
               .steps = steps.data(),
               .code_sums = code_sums.data(),
               .sums = sums.data(),
               .count = count,
               .num_words = num_words};
    transposed.resize(static_cast<size_t>(num_words * kTileKeys));
  }
  std::vector<float> Logits(const KeyTileFunctions& form) {
    std::vector<float> logits(static_cast<size_t>(queries.count * kTileKeys), 7.0f);
    form.page_logits(page, queries, transposed.data(), logits.data());
    return logits;
  }

  std::vector<uint32_t> words, quads, transposed;
  std::vector<uint16_t> scales, zeros;
  std::vector<float> steps, sums;
  std::vector<int32_t> code_sums;
  CodedPage page;
  CodedQueries queries;
};

TEST(KeyTile, LogitsOfPagesHaveTheSameBitsInAllForms) {
  HostileRandom random;
  for (const int64_t words : {1, 2, 3, 4, 5, 8, 10, 16, 32}) {
    for (const int64_t count : {1, 2, 4, 5, 7, 8}) {
      SCOPED_TRACE(testing::Message() << "words " << words << ", queries " << count);
      CodedProduct product(words, count, random);
      const std::vector<float> expected = product.Logits(kKeyTilePlain);
      for (const KeyTileFunctions* form : Forms()) ExpectSame(product.Logits(*form), expected);
    }
  }
}

// The largest codes of both signs: sums of four words just fit 16 bits.
TEST(KeyTile, LogitsOfPagesDoNotOverflow) {
  HostileRandom random;
  for (const uint32_t quad : {0x7f7f7f7fu, 0x81818181u}) {
    CodedProduct product(32, 4, random);
    std::fill(product.words.begin(), product.words.end(), ~0u);
    std::fill(product.quads.begin(), product.quads.end(), quad);
    std::fill(product.scales.begin(), product.scales.end(), uint16_t{0x3c00});  // 1
    std::fill(product.zeros.begin(), product.zeros.end(), uint16_t{0});
    std::fill(product.steps.begin(), product.steps.end(), 1.0f);
    std::fill(product.sums.begin(), product.sums.end(), 0.0f);
    std::fill(product.code_sums.begin(), product.code_sums.end(), 0);
    const float expected = (quad == 0x7f7f7f7fu ? 1.0f : -1.0f) * 32 * 8 * 15 * 127;
    std::vector<const KeyTileFunctions*> forms = Forms();
    forms.push_back(&kKeyTilePlain);
    for (const KeyTileFunctions* form : forms) {
      for (const float logit : product.Logits(*form)) ASSERT_EQ(logit, expected);
    }
  }
}

TEST(KeyTile, WeightsHaveTheSameBitsInAllForms) {
  HostileRandom random;
  for (int round = 0; round < 50; ++round) {
    std::vector<float> logits = random.Many(kTileKeys);
    for (float& x : logits) x *= std::ldexp(1.0f, round % 8);
    const float largest = kKeyTilePlain.largest(logits.data());
    const TileWeights params = {.logits = logits.data(),
                                .scale = 0.3f,
                                .max = 0.3f * largest + (round % 2 == 0 ? 0.0f : 0.7f)};
    std::vector<float> before = random.Many(kTileKeys), expected = before;
    kKeyTilePlain.add_weights(params, expected.data());
    for (const KeyTileFunctions* form : Forms()) {
      EXPECT_EQ(form->largest(logits.data()), largest);
      std::vector<float> found = before;
      form->add_weights(params, found.data());
      ExpectSame(found, expected);
    }
    if (std::isinf(largest)) continue;
    expected = logits;
    kKeyTilePlain.take_weights(largest, -5, expected.data());
    for (const KeyTileFunctions* form : Forms()) {
      std::vector<float> found = logits;
      form->take_weights(largest, -5, found.data());
      ExpectSame(found, expected);
    }
  }
}

TEST(KeyTile, TheReferenceWeighsByTheExponential) {
  std::vector<float> logits(kTileKeys), sums(kTileKeys, 0.0f);
  for (size_t t = 0; t < kTileKeys; ++t) logits[t] = 50 - 3.1f * static_cast<float>(t);
  logits[40] = kNan;
  logits[41] = -kInfinity;
  EXPECT_EQ(kKeyTilePlain.largest(logits.data()), 50.0f);
  kKeyTilePlain.add_weights({.logits = logits.data(), .scale = 0.5f, .max = 25}, sums.data());
  EXPECT_EQ(sums[0], 1.0f);
  for (size_t t = 0; t < kTileKeys; ++t) {
    if (t == 40) {
      EXPECT_TRUE(std::isnan(sums[t]));
      continue;
    }
    const double weight = std::exp(std::max(-88.0, 0.5 * double{logits[t]} - 25));
    EXPECT_NEAR(sums[t] / weight, 1, 4e-6) << t;
  }
  std::vector<float> weights = logits;
  kKeyTilePlain.take_weights(50, -87, weights.data());
  EXPECT_EQ(weights[0], 1.0f);
  for (size_t t = 1; t < kTileKeys; ++t) {
    const double below = double{logits[t]} - 50;
    if (t == 40 || below < -87) {
      EXPECT_EQ(weights[t], 0.0f) << t;
    } else {
      EXPECT_NEAR(weights[t] / std::exp(below), 1, 4e-6) << t;
    }
  }
  const std::vector<float> nothing(kTileKeys, kNan);
  EXPECT_EQ(kKeyTilePlain.largest(nothing.data()), -kInfinity);
}

}  // namespace
}  // namespace kvasir::kernels
