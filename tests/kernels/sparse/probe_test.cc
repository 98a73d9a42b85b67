// Which token of a chunk stands best for it (InfiniteHiP, arXiv 2502.08910, and HiP, 2406.09827):
// on keys that are alike nearby, at several scales as text is, chunks judged by their centre keep
// more attention mass than chunks judged by their first token.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/sparse/policy.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kTokens = 131072, kHeadDim = 16, kGroup = 4, kQueries = 6;
constexpr PolicyNumbers kNumbers = {.sink_tokens = 64, .window_tokens = 512, .budget_tokens = 2048};

// Sums of random walks that forget after 8, 64, 512 and 4,096 tokens.
void FillWithLocalKeys(AttentionBatch& batch) {
  batch.FillContext(0, kTokens);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kHeadDim; ++i) {
    std::vector<float> walks(4);
    for (int64_t t = 0; t < kTokens; ++t) {
      float key = 0, span = 8;
      for (float& walk : walks) {
        const float keep = std::exp(-1 / span);
        walk = keep * walk + std::sqrt(1 - keep * keep) * normal(batch.rng());
        key += walk / 2;
        span *= 8;
      }
      FakePagedKv& kv = batch.kv();
      kv.Set(kv.Token(FakePagedKv::Side::kKey, 0, t, AttentionBatch::kLayer, 0), i, key);
    }
  }
  for (int64_t begin = 0; begin < kTokens; begin += kPageTokens) {
    KVASIR_CHECK(RebuildBounds(batch.kv().View(), 0, begin / kPageTokens, kPageTokens).ok());
    KVASIR_CHECK(RebuildKeyCodes(batch.kv().View(), 0, begin / kPageTokens, kPageTokens).ok());
  }
}

AttentionBatch MakeBatch(uint64_t seed) {
  AttentionBatch batch({.head_dim = kHeadDim, .kv_heads = 1, .group = kGroup}, 1, kTokens, seed);
  FillWithLocalKeys(batch);
  for (int64_t r = 0; r < kQueries; ++r) {
    batch.AddBlock(0, kTokens - 1, 1);
    for (int64_t i = 0; i < kGroup * kHeadDim; ++i) batch.q(r, 0)[i] *= 3;  // far from uniform
  }
  return batch;
}

// The scaled logits of one head's query and all keys.
std::vector<double> Logits(AttentionBatch& batch, int64_t query, int64_t head) {
  const double scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
  std::vector<double> logits;
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::byte* key =
        batch.kv().Token(FakePagedKv::Side::kKey, 0, t, AttentionBatch::kLayer, 0);
    double dot = 0;
    for (int64_t i = 0; i < kHeadDim; ++i) {
      dot += static_cast<double>(batch.q(query, head)[i] * batch.kv().Get(key, i));
    }
    logits.push_back(scale * dot);
  }
  return logits;
}

// The share of each head's dense weight that the selection's tokens hold, on average.
double MassKept(AttentionBatch& batch, const PageSelection& selection) {
  double mass = 0;
  for (int64_t r = 0; r < kQueries; ++r) {
    std::vector<uint8_t> kept(kTokens);
    for (SelectedPages walk(selection.header(r), selection.list(r), kTokens - 1); walk.valid();
         walk.Next()) {
      for (int64_t t = 0; t < kPageTokens; ++t) {
        kept[static_cast<size_t>(walk.page() * kPageTokens + t)] = walk.mask() >> t & 1;
      }
    }
    for (int64_t g = 0; g < kGroup; ++g) {
      double all = 0, some = 0;
      const std::vector<double> logits = Logits(batch, r, g);
      for (size_t t = 0; t < logits.size(); ++t) {
        all += std::exp(logits[t]);
        some += kept[t] != 0 ? std::exp(logits[t]) : 0;
      }
      mass += some / all / static_cast<double>(kGroup * kQueries);
    }
  }
  return mass;
}

double MassKept(const std::string& probe, AttentionBatch& batch) {
  const auto selector = MakeSelector("infinitehip", {{.name = "probe", .value = probe}}).value();
  const std::vector<PolicyNumbers> numbers(kQueries, kNumbers);
  PageSelection selection = batch.MakeSelection(selector->MaxEntries(kNumbers, kTokens));
  SerialExecutor executor;
  EXPECT_TRUE(selector->Select(batch.ParamsForSelect(numbers), selection, executor).ok());
  EXPECT_EQ(selection.header(0).kind, SelectionHeader::Kind::kList);
  return MassKept(batch, selection);
}

TEST(InfiniteHipProbe, TheCentreStandsBetterForAChunkThanItsFirstToken) {
  AttentionBatch batch = MakeBatch(1);
  const double first = MassKept("first", batch), centre = MassKept("centre", batch);
  EXPECT_GT(centre, first + 0.02) << "first " << first;
  EXPECT_GT(first, 0.3) << "keys are not alike nearby";
  EXPECT_LT(centre, 0.9) << "too easy: nothing is shown";
}

// Share of the chunks of 256 tokens where the half whose token has the larger logit is the one that
// holds the largest; the token `offset` of the 128 of each half.
double RightHalves(const std::vector<std::vector<double>>& heads, int64_t offset) {
  int64_t right = 0, chunks = 0;
  for (const std::vector<double>& logits : heads) {
    for (auto begin = logits.begin(); begin != logits.end(); begin += 256, ++chunks) {
      const bool left_is_best = std::max_element(begin, begin + 256) < begin + 128;
      right += (begin[offset] > begin[128 + offset]) == left_is_best;
    }
  }
  return static_cast<double>(right) / static_cast<double>(chunks);
}

TEST(Representative, TheCentreChoosesTheBetterHalfMoreOftenThanTheFirstOrLastToken) {
  AttentionBatch batch = MakeBatch(2);
  std::vector<std::vector<double>> heads;
  for (int64_t r = 0; r < kQueries; ++r) heads.push_back(Logits(batch, r, 0));
  const double first = RightHalves(heads, 0), centre = RightHalves(heads, 64),
               last = RightHalves(heads, 127);
  EXPECT_GT(centre, first + 0.04) << "first " << first;
  EXPECT_GT(centre, last + 0.04) << "last " << last;
}

}  // namespace
}  // namespace kvasir::kernels
