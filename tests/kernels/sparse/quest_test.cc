#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "kernels/base/cpu_isa.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/page_scores/quest_score.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "tests/support/attention_batch.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;
using Kind = SelectionHeader::Kind;
using Side = FakePagedKv::Side;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kLayer = AttentionBatch::kLayer;

// max over rows and heads of what quest_rule.h says, in double.
double ScoreOracle(AttentionBatch& batch, QuestScore score, int64_t block_index, int64_t kv_head,
                   int64_t page) {
  const QueryTile& tile = batch.blocks()[static_cast<size_t>(block_index)];
  const int64_t d = batch.shape().head_dim;
  const std::byte* bounds = batch.kv().View().Bounds(tile.slot, page, kLayer, kv_head);
  double best = -std::numeric_limits<double>::infinity();
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    for (int64_t g = 0; g < batch.shape().group; ++g) {
      const float* q = batch.q(tile.first_row + r, kv_head * batch.shape().group + g);
      double sum = 0;
      for (int64_t i = 0; i < d; ++i) {
        const auto [low, high] =
            std::minmax({double{q[i]} * double{batch.kv().Get(bounds, i)},
                         double{q[i]} * double{batch.kv().Get(bounds, d + i)}});
        sum += score == QuestScore::kBound ? high : high + low / 2;
      }
      best = std::max(best, sum);
    }
  }
  return best;
}

PageSelection Select(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                     int64_t capacity, QuestScore score = QuestScore::kEstimate) {
  PageSelection selection = batch.MakeSelection(capacity);
  SerialExecutor executor;
  const absl::Status status =
      QuestSelector(score).Select(batch.ParamsForSelect(numbers), selection, executor);
  EXPECT_TRUE(status.ok()) << status;
  return selection;
}

TEST(Quest, TheBoundBoundsEveryLogitOfThePage) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t rows : {1, 7}) {
      AttentionBatch batch({.kv = kv, .head_dim = 64, .kv_heads = 2, .group = 3}, 1, 1024, 61);
      batch.FillContext(0, 1024);
      batch.AddBlock(0, 1000, rows);
      const PageSelection selection =
          Select(batch, {std::vector<PolicyNumbers>(1, {0, 1, 64 * 16})}, 16);
      ASSERT_EQ(selection.header(0).kind, Kind::kAll) << "R2";
      const PageSelection scored = Select(batch, {{0, 1, 900}}, 16, QuestScore::kBound);
      for (int64_t head = 0; head < 2; ++head) {
        ASSERT_EQ(scored.header(head).count, 15);
        for (int32_t i = 0; i < scored.header(head).count; ++i) {
          const SelectionEntry& entry = scored.list(head)[i];
          EXPECT_NEAR(entry.score, ScoreOracle(batch, QuestScore::kBound, 0, head, entry.page),
                      1e-3);
          for (int64_t t = entry.page * 64; t < std::min<int64_t>(entry.page * 64 + 64, 1000);
               ++t) {
            const std::byte* key = batch.kv().Token(Side::kKey, 0, t, kLayer, head);
            for (int64_t r = 0; r < rows; ++r) {
              for (int64_t g = 0; g < 3; ++g) {
                double logit = 0;
                for (int64_t d = 0; d < 64; ++d) {
                  logit += double{batch.q(r, head * 3 + g)[d]} * double{batch.kv().Get(key, d)};
                }
                EXPECT_LE(logit, double{entry.score} + 1e-4);
              }
            }
          }
        }
      }
    }
  }
}

struct ScoreVariant {
  QuestScoreFn* scores;
  DType query;
  DType bounds;
  bool runs_here;
};

std::vector<ScoreVariant> AllScoreVariants() {
  return {
      {QuestScoresFloat32, DType::kFloat32, DType::kFloat32, true},
      {QuestScoresBFloat16, DType::kFloat32, DType::kBFloat16, true},
      {KVASIR_ON_ARM(QuestScoresNeonFloat32), DType::kFloat32, DType::kFloat32,
       CpuHas(CpuIsa::kNeon)},
      {KVASIR_ON_ARM(QuestScoresNeonBFloat16), DType::kFloat32, DType::kBFloat16,
       CpuHas(CpuIsa::kNeon)},
      {KVASIR_ON_X86(QuestScoresAvx2Float32), DType::kFloat32, DType::kFloat32,
       CpuHas(CpuIsa::kAvx2)},
      {KVASIR_ON_X86(QuestScoresAvx2BFloat16), DType::kFloat32, DType::kBFloat16,
       CpuHas(CpuIsa::kAvx2)},
      {KVASIR_ON_X86(QuestScoresAvx512Float32), DType::kFloat32, DType::kFloat32,
       CpuHas(CpuIsa::kAvx512)},
      {KVASIR_ON_X86(QuestScoresAvx512BFloat16), DType::kFloat32, DType::kBFloat16,
       CpuHas(CpuIsa::kAvx512)},
      {KVASIR_ON_X86(QuestScoresAvx512Bf16Pairs), DType::kBFloat16, DType::kBFloat16,
       CpuHas(CpuIsa::kAvx512Bf16)},
  };
}

// Best product of a page's bounds with a query, in double; -inf for a page of NaN.
double BestProduct(TestTensor& q, TestTensor& bounds, int64_t page) {
  const int64_t queries = q.view().dim(0), length = q.view().dim(1);
  double best = -std::numeric_limits<double>::infinity();
  for (int64_t query = 0; query < queries; ++query) {
    double sum = 0;
    for (int64_t j = 0; j < length; ++j) {
      sum += double{q.Get(query * length + j)} * double{bounds.Get(page * length + j)};
    }
    if (sum > best) best = sum;
  }
  return best;
}

// Pages 0, 17 and 63 are missing, page 7 has a NaN, and so has one of more than two queries.
void ExpectScoresAreProducts(const ScoreVariant& v, int64_t d, int64_t queries,
                             std::mt19937_64& rng, std::normal_distribution<float>& normal) {
  TestTensor q(v.query, {queries, 2 * d});
  TestTensor bounds(v.bounds, {64, 2 * d});
  for (int64_t i = 0; i < q.size(); ++i) q.Set(i, rng() % 2 == 0 ? normal(rng) : 0.0f);
  for (int64_t i = 0; i < bounds.size(); ++i) bounds.Set(i, normal(rng));
  bounds.Set(7 * 2 * d + 3, kNan);
  if (queries > 2) q.Set(1 * 2 * d, kNan);  // this query counts for nothing
  const std::byte* pages[64] = {};
  for (int64_t i = 0; i < 64; ++i) {
    pages[i] =
        bounds.view().As<const std::byte>() + i * 2 * d * static_cast<int64_t>(DTypeSize(v.bounds));
  }
  pages[0] = pages[17] = pages[63] = nullptr;
  const HostBuffer workspace = HostBuffer::Allocate(QuestScoreWorkspaceBytes(d)).value();
  float scores[64];
  v.scores({.signed_q = q.view().data(),
            .num_queries = queries,
            .head_dim = d,
            .workspace = workspace.data()},
           pages, scores);
  for (int64_t i = 0; i < 64; ++i) {
    const double best =
        pages[i] == nullptr ? -std::numeric_limits<double>::infinity() : BestProduct(q, bounds, i);
    if (std::isinf(best)) {
      EXPECT_EQ(scores[i], -kInfinity) << "page " << i;
    } else {
      EXPECT_NEAR(scores[i], best, 1e-4) << "page " << i;
    }
  }
}

// All score functions against the sum in double, with missing pages, NaN, and odd numbers of
// queries.
TEST(QuestScores, EveryVariantComputesTheProduct) {
  const std::vector<ScoreVariant> variants = AllScoreVariants();
  std::mt19937_64 rng(67);
  std::normal_distribution<float> normal;
  for (size_t variant = 0; variant < variants.size(); ++variant) {
    if (!variants[variant].runs_here) continue;
    for (const int64_t d : {16, 64, 80, 128}) {
      for (const int64_t queries : {1, 2, 3, 4, 5, 8, 64}) {
        SCOPED_TRACE(testing::Message()
                     << "variant " << variant << " head_dim " << d << " queries " << queries);
        ExpectScoresAreProducts(variants[variant], d, queries, rng, normal);
      }
    }
  }
}

void ExpectKeepsTheBest(QuestScore score) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
      AttentionBatch batch({.activation = activation, .kv = kv, .head_dim = 128}, 1, 4096, 62);
      batch.FillContext(0, 4096);
      batch.AddBlock(0, 4095, 1);
      batch.AddBlock(0, 4032, 64);
      constexpr PolicyNumbers kNumbers = {
          .sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600};
      const PageSelection selection = Select(batch, {kNumbers, kNumbers}, 10, score);
      for (int64_t row = 0; row < 4; ++row) {
        const int64_t first = row < 2 ? 4095 : 4032;
        const int64_t window_page = (first - 200 + 1) / kPageTokens;
        std::vector<std::pair<double, int64_t>> ranked;
        for (int64_t page = 1; page <= window_page; ++page) {
          ranked.emplace_back(ScoreOracle(batch, score, row / 2, row % 2, page), page);
        }
        std::sort(ranked.rbegin(), ranked.rend());
        std::set<int64_t> expected;
        for (size_t i = 0; i < 10; ++i) expected.insert(ranked[i].second);
        std::set<int64_t> found;
        ASSERT_EQ(selection.header(row).count, 10) << "600 tokens are 10 pages";
        for (int32_t i = 0; i < 10; ++i) found.insert(selection.list(row)[i].page);
        EXPECT_EQ(found, expected) << "row " << row;
      }
    }
  }
}

TEST(Quest, KeepsThePagesOfTheLargestScores) {
  for (const QuestScore score : {QuestScore::kBound, QuestScore::kEstimate}) {
    SCOPED_TRACE(static_cast<int>(score));
    ExpectKeepsTheBest(score);
  }
}

TEST(Quest, NamesItsOptionsWhereOneIsUnknown) {
  EXPECT_EQ(QuestSelector::Create({{"score", "mean"}}).status().message(),
            "quest has no score 'mean'; there are bound and estimate");
  EXPECT_EQ(QuestSelector::Create({{"probe", "digest"}}).status().message(),
            "quest has no option 'probe'; its option is score");
}

TEST(Quest, CandidatesArePagesThatTouchTheSparseRange) {
  AttentionBatch batch({}, 1, 1024, 63);
  batch.FillContext(0, 1024);
  batch.AddBlock(0, 1000, 1);
  // Sparse range [64, 640): pages 1..9 exactly; a budget for more pages than there are.
  PageSelection selection = Select(batch, {{64, 361, 64 * 9}}, 16);
  ASSERT_EQ(selection.header(0).kind, Kind::kAll) << "64 + 361 + 576 covers 1001";
  selection = Select(batch, {{64, 361, 64 * 8}}, 16);
  EXPECT_EQ(selection.header(0).count, 8);
  // Sparse range [63, 641): pages 0..10.
  selection = Select(batch, {{63, 360, 577}}, 16);
  ASSERT_EQ(selection.header(0).kind, Kind::kList);
  EXPECT_EQ(selection.header(0).sink_end, 63);
  EXPECT_EQ(selection.header(0).window_begin, 641);
  EXPECT_EQ(selection.header(0).count, 10);
}

TEST(Quest, TiesGoToTheLaterPage) {
  AttentionBatch batch({.kv_heads = 1, .group = 1}, 1, 1024, 64);
  batch.FillContext(0, 1024);
  batch.AddBlock(0, 1023, 1);
  for (int64_t page = 0; page < 16; ++page) {  // all bounds alike
    std::byte* bounds = batch.kv().View().Bounds(0, page, kLayer, 0);
    for (int64_t i = 0; i < 128; ++i) batch.kv().Set(bounds, i, page == 3 ? 2.0f : 1.0f);
  }
  for (int64_t i = 0; i < 64; ++i) batch.q(0, 0)[i] = 0.5f;
  const PageSelection selection = Select(batch, {{0, 1, 3 * 64}}, 3);
  ASSERT_EQ(selection.header(0).count, 3);
  EXPECT_EQ(selection.list(0)[0].page, 3);
  EXPECT_EQ(selection.list(0)[1].page, 14);
  EXPECT_EQ(selection.list(0)[2].page, 15);
}

TEST(Quest, NanBoundsAndNanQueriesLoseAgainstEverything) {
  AttentionBatch batch({.kv_heads = 2, .group = 1}, 1, 1024, 65);
  batch.FillContext(0, 1024);
  batch.AddBlock(0, 1023, 1);
  for (const int64_t page : {2, 5, 14}) {
    std::byte* bounds = batch.kv().View().Bounds(0, page, kLayer, 0);
    for (int64_t i = 0; i < 128; ++i) batch.kv().Set(bounds, i, kNan);
  }
  batch.q(0, 1)[3] = kNan;  // head 1: all scores NaN, still a valid list: the latest pages
  const PageSelection selection = Select(batch, {{0, 1, 13 * 64}}, 13);
  ASSERT_EQ(selection.header(0).count, 13);
  for (int32_t i = 0; i < 13; ++i) {
    EXPECT_NE(selection.list(0)[i].page, 2);
    EXPECT_NE(selection.list(0)[i].page, 5);
    EXPECT_NE(selection.list(0)[i].page, 14);
    EXPECT_EQ(selection.list(1)[i].page, 3 + i);
    EXPECT_EQ(selection.list(1)[i].score, -kInfinity);
  }
}

TEST(Quest, WithoutBoundsOrRoomItRefuses) {
  AttentionBatch batch({}, 1, 1024, 66);
  batch.FillContext(0, 1024);
  batch.AddBlock(0, 1023, 1);
  const std::vector<PolicyNumbers> numbers = {{0, 1, 200}};
  PageSelection selection = batch.MakeSelection(4);
  SerialExecutor executor;
  SelectParams p = batch.ParamsForSelect(numbers);
  p.kv.bounds = nullptr;
  EXPECT_EQ(QuestSelector().Select(p, selection, executor).code(),
            absl::StatusCode::kFailedPrecondition);
  selection = batch.MakeSelection(3);
  EXPECT_EQ(QuestSelector().Select(batch.ParamsForSelect(numbers), selection, executor).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Ranked, OrdersByScoreThenPageWithNanLast) {
  const float scores[] = {-kInfinity, -3.5f, -1e-40f, 0.0f, 1e-40f, 2.0f, kInfinity};
  for (size_t i = 0; i < std::size(scores); ++i) {
    EXPECT_EQ(Ranked(scores[i], 7).score(), scores[i]);
    EXPECT_EQ(Ranked(scores[i], 7).item(), 7);
    EXPECT_LT(Ranked(scores[i], 7), Ranked(scores[i], 8));
    for (size_t j = i + 1; j < std::size(scores); ++j) {
      EXPECT_LT(Ranked(scores[i], 9), Ranked(scores[j], 1));
    }
  }
  EXPECT_LT(Ranked(kNan, 9), Ranked(-3.5f, 1));
  EXPECT_LT(Ranked(-kNan, 9), Ranked(-3.5f, 1));
  EXPECT_LT(Ranked(kNan, 9), Ranked(-kInfinity, 10)) << "NaN counts as -inf";
  EXPECT_LT(Ranked(-0.0f, 1), Ranked(0.0f, 2)) << "zeros tie";
  EXPECT_LT(Ranked(0.0f, 1), Ranked(-0.0f, 2));
}

}  // namespace
}  // namespace kvasir::kernels
