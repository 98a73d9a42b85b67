// The choice of kernels on the GPU, which needs none: the shapes at which each plan changes, and
// the texts that say so.
#include <gtest/gtest.h>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/append/append_heads_plan.h"
#include "kernels/attention/attend_kernel.h"
#include "kernels/attention/prepared_pages.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/sampling/sampling_plan.h"
#include "kernels/sparse/infinitehip/infinitehip_plan.h"
#include "kernels/sparse/quest/quest_plan.h"
#include "kernels/sparse/tokenselect/tokenselect_plan.h"
#include "kernels/sparse/top_p/top_p_plan.h"

namespace kvasir::kernels {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;

template <typename Plan>
std::string TextOf(const Plan& plan) {
  std::ostringstream text;
  text << plan;
  return text.str();
}

TEST(KernelPlans, DecodeHasACtaPerMultiprocessor) {
  const AttendKernelPlan plan =
      PlanAttendDecode({.head_dim = 128, .rows = 3, .group = 4, .placement = Placement::kCached},
                       /*num_processors=*/132);
  EXPECT_EQ(TextOf(plan), "decode kernel, head_dim 128, group 4, cached positions, 132 CTAs");
}

TEST(KernelPlans, DecodeTakesEightHeadsOfAGroupAtATime) {
  AttendShape shape = {.head_dim = 64, .rows = 3, .placement = Placement::kCached};
  for (const auto& [group, parts] :
       {std::pair(1, 1), std::pair(8, 1), std::pair(9, 2), std::pair(16, 2), std::pair(17, 3)}) {
    shape.group = group;
    EXPECT_EQ(PlanAttendDecode(shape, 132).parts, parts) << group;
  }
  EXPECT_EQ(TextOf(PlanAttendDecode(shape, 132)),
            "decode kernel, head_dim 64, group 17, cached positions, 3 x 44 CTAs");
}

TEST(KernelPlans, PrefillHasACtaForTwoHeadsOfARow) {
  AttendShape shape = {.head_dim = 64, .rows = 6, .group = 7, .placement = Placement::kGrouped};
  EXPECT_EQ(TextOf(PlanAttendPrefill(shape)),
            "prefill kernel, head_dim 64, group 7, grouped positions, 6 x 4 CTAs");
  EXPECT_EQ(TextOf(PlanAttendPrepared(shape, /*num_kv_heads=*/3, /*num_heads=*/2)),
            "prefill kernel over prepared pages, head_dim 64, group 7, grouped positions, 4 x 4 "
            "CTAs");
  shape.group = 1;
  EXPECT_EQ(PlanAttendPrefill(shape).ctas_of_row, 1u);
  shape.group = 8;
  EXPECT_EQ(PlanAttendPrefill(shape).ctas_of_row, 4u);
}

// A prompt's last `count` tiles.
void AddTiles(int64_t slot, int64_t tokens, int64_t count, std::vector<QueryTile>& tiles) {
  for (int64_t i = count; i > 0; --i) {
    tiles.push_back(
        {.slot = slot, .num_rows = kPageTokens, .first_position = tokens - i * kPageTokens});
  }
}

TEST(KernelPlans, PagesThatManyTilesReadArePrepared) {
  const KvLayout layout = {
      .num_layers = 2, .num_kv_heads = 8, .head_dim = 128, .dtype = DType::kFloat8E4M3};
  const int64_t bytes = PreparedBytes(layout, 131072);
  EXPECT_EQ(bytes, int64_t{512} << 20);  // all heads
  std::vector<QueryTile> tiles;
  AddTiles(5, 65536, 3, tiles);
  EXPECT_FALSE(PlanPreparedPages(tiles, layout, bytes).has_value()) << "each page is read thrice";
  AddTiles(2, 65536, 8, tiles);
  const auto plan = PlanPreparedPages(tiles, layout, bytes);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->num_pages, 2048);
  EXPECT_EQ(plan->num_heads, 8);
  EXPECT_EQ(plan->FirstPage(5), 0);
  EXPECT_EQ(plan->FirstPage(2), 1024);
  EXPECT_EQ(plan->sequences[1].num_tokens, 65536);
}

TEST(KernelPlans, LongSequencesArePreparedInPassesOfHeads) {
  const KvLayout layout = {
      .num_layers = 2, .num_kv_heads = 8, .head_dim = 128, .dtype = DType::kInt8};
  EXPECT_EQ(PreparedBytes(layout, 1000), 16 * 64 * 512 * 8);
  EXPECT_EQ(PreparedBytes(layout, 1 << 20), int64_t{512} << 20);
  EXPECT_EQ(PreparedBytes(layout, 3 << 20), int64_t{1} << 30);
  const auto heads_of = [&](int64_t tokens, int64_t bytes) -> int64_t {
    std::vector<QueryTile> tiles;
    AddTiles(0, tokens, 8, tiles);
    const auto plan = PlanPreparedPages(tiles, layout, bytes);
    return plan.has_value() ? plan->num_heads : 0;
  };
  constexpr int64_t kBytes = int64_t{512} << 20;
  EXPECT_EQ(heads_of(131072, kBytes), 8);
  EXPECT_EQ(heads_of(131072 + 64, kBytes), 4);  // 7 fit: two passes of four
  EXPECT_EQ(heads_of(3 * 131072, kBytes), 2);
  EXPECT_EQ(heads_of(1 << 20, kBytes), 1);
  EXPECT_EQ(heads_of((1 << 20) + 64, kBytes), 0);
}

TEST(KernelPlans, AsManySequencesArePreparedAsAPlanNames) {
  const KvLayout layout = {
      .num_layers = 1, .num_kv_heads = 1, .head_dim = 64, .dtype = DType::kInt8};
  std::vector<QueryTile> tiles;
  for (int64_t slot = 0; slot < kMostPreparedSequences; ++slot) AddTiles(slot, 640, 10, tiles);
  EXPECT_TRUE(PlanPreparedPages(tiles, layout, 1 << 30).has_value());
  AddTiles(kMostPreparedSequences, 640, 10, tiles);
  EXPECT_FALSE(PlanPreparedPages(tiles, layout, 1 << 30).has_value());
  EXPECT_FALSE(PlanPreparedPages({}, layout, 1 << 30).has_value());
}

LinearPlan::Kernel KernelOf(const LinearCall& call) { return PlanLinear(call).kernel; }

TEST(KernelPlans, OurProductsAreForUpTo64RowsOfBFloat16) {
  using Kernel = LinearPlan::Kernel;
  const LinearCall call = {.rows = 1,
                           .k = 4096,
                           .n = 4096,
                           .input = kBf16,
                           .has_norm = true,
                           .is_aligned = true,
                           .few_rows_fit = true,
                           .few_rows_normalize = true};
  EXPECT_EQ(KernelOf(call), Kernel::kFewRows);
  EXPECT_EQ(TextOf(PlanLinear(call)), "1 x 4096 x 4096, bfloat16, normalized: kernel for few rows");
  LinearCall other = call;
  other.rows = 2;
  EXPECT_EQ(KernelOf(other), Kernel::kBatch);
  EXPECT_EQ(TextOf(PlanLinear(other)),
            "2 x 4096 x 4096, bfloat16, normalized: kernel for a batch of rows");
  other.rows = 64;
  EXPECT_EQ(KernelOf(other), Kernel::kBatch);
  other.k = 4092;  // rows that are not aligned to 16 bytes
  EXPECT_EQ(KernelOf(other), Kernel::kCublasLt);
  other = call;
  other.rows = 65;
  EXPECT_EQ(KernelOf(other), Kernel::kCublasLt);
  EXPECT_EQ(TextOf(PlanLinear(other)), "65 x 4096 x 4096, bfloat16, normalized: cuBLASLt");
  other = call;
  other.input = kF32;
  EXPECT_EQ(KernelOf(other), Kernel::kCublasLt);
  other = call;
  other.is_aligned = false;
  EXPECT_EQ(KernelOf(other), Kernel::kCublasLt);
  other = call;
  other.few_rows_fit = false;
  EXPECT_EQ(KernelOf(other), Kernel::kBatch);
  other = call;
  other.few_rows_normalize = false;
  EXPECT_EQ(KernelOf(other), Kernel::kNormThenFewRows);
  other.has_norm = false;
  EXPECT_EQ(KernelOf(other), Kernel::kFewRows);
}

// The layers of Llama-3.1-8B on the 132 multiprocessors of an H100.
TEST(KernelPlans, ABatchKeepsAllMultiprocessorsEquallyBusy) {
  const auto plan_of = [](int64_t weight_rows, int64_t rows) {
    const BatchPlan plan = PlanBatch(weight_rows, rows, 132);
    return (testing::Message() << plan.clusters << " clusters, " << plan.num_tiles << " tiles of "
                               << plan.tile_units << ", " << plan.x_rows << " rows of x")
        .GetString();
  };
  EXPECT_EQ(plan_of(6144, 64), "64 clusters, 128 tiles of 3, 32 rows of x");
  EXPECT_EQ(plan_of(4096, 33), "64 clusters, 128 tiles of 2, 24 rows of x");
  EXPECT_EQ(plan_of(28672, 17), "64 clusters, 128 tiles of 14, 16 rows of x");
  EXPECT_EQ(plan_of(4096, 2), "64 clusters, 128 tiles of 2, 8 rows of x");
  EXPECT_EQ(plan_of(128256, 8), "66 clusters, 1146 tiles of 7, 8 rows of x");  // 9 each
  EXPECT_EQ(plan_of(8, 64), "1 clusters, 1 tiles of 1, 32 rows of x");  // one CTA only brings x
}

TEST(KernelPlans, PromptsOfBFloat16AreAppendedManyTokensAtOnce) {
  using Kernel = AppendHeadsPlan::Kernel;
  const AppendHeadsShape shape = {
      .num_tokens = 9, .num_tiles = 8, .head_dim = 128, .dtype = kBf16, .kv = kBf16};
  EXPECT_EQ(PlanAppendHeads(shape).kernel, Kernel::kPrompt);
  EXPECT_EQ(TextOf(PlanAppendHeads(shape)),
            "9 tokens in 8 tiles, head_dim 128, bfloat16, KV bfloat16: kernel of prompts");
  AppendHeadsShape other = shape;
  other.kv = DType::kInt8;
  EXPECT_EQ(PlanAppendHeads(other).kernel, Kernel::kPrompt);
  other = shape;
  other.num_tokens = 8;  // one token a tile
  EXPECT_EQ(PlanAppendHeads(other).kernel, Kernel::kElements);
  other = shape;
  other.head_dim = 80;
  EXPECT_EQ(PlanAppendHeads(other).kernel, Kernel::kElements);
  other = shape;
  other.kv = kF32;
  EXPECT_EQ(PlanAppendHeads(other).kernel, Kernel::kElements);
  other = shape;
  other.dtype = kF32;
  EXPECT_EQ(PlanAppendHeads(other).kernel, Kernel::kElements);
}

TEST(KernelPlans, RowsShareTheCtasOfSampling) {
  for (const auto& [rows, ctas] : {std::pair<int64_t, unsigned>{1, 16},
                                   {4, 16},
                                   {5, 8},
                                   {8, 8},
                                   {9, 4},
                                   {32, 2},
                                   {33, 1},
                                   {1000, 1}}) {
    EXPECT_EQ(PlanSampling(rows, 16).ctas_of_row, ctas) << rows;
  }
  EXPECT_EQ(PlanSampling(1, 8).ctas_of_row, 8u);
  EXPECT_EQ(TextOf(PlanSampling(5, 16)), "5 rows of 8 CTAs");
}

constexpr SelectShape kSelect = {
    .head_dim = 128, .group = 4, .q = kBf16, .kv = kBf16, .max_pages = 2048, .rows = 16};

TEST(KernelPlans, QuestIsOneKernelForOneToken) {
  EXPECT_TRUE(PlanQuest(kSelect, false).is_one_kernel());
  EXPECT_EQ(TextOf(PlanQuest(kSelect, false)),
            "16 rows, head_dim 128, group 4, q bfloat16, KV bfloat16, 2048 pages: one kernel");
  EXPECT_FALSE(PlanQuest(kSelect, true).is_one_kernel());
  SelectShape shape = kSelect;
  shape.group = 9;
  EXPECT_FALSE(PlanQuest(shape, false).is_one_kernel());
  shape = kSelect;
  shape.max_pages = kMaxChosenPages;
  EXPECT_TRUE(PlanQuest(shape, false).is_one_kernel());
  shape.max_pages = kMaxChosenPages + 1;
  EXPECT_FALSE(PlanQuest(shape, false).is_one_kernel());
}

TEST(KernelPlans, PagesAreScoredByProductsOfBFloat16) {
  SelectShape shape = kSelect;
  EXPECT_EQ(TextOf(PlanPageScores(shape, true, 1)), "products for few queries and for many");
  EXPECT_EQ(TextOf(PlanPageScores(shape, false, 4)), "products for few queries");
  EXPECT_EQ(TextOf(PlanPageScores(shape, true, 4)), "plain scores of pages");  // of means
  shape.kv = kF32;
  EXPECT_EQ(TextOf(PlanPageScores(shape, true, 1)), "plain scores of pages");
}

TEST(KernelPlans, InfiniteHipIsOneKernelForOneTokenOfAKvGroup) {
  const InfiniteHipCall call = {
      .shape = kSelect, .pages = PlanPageScores(kSelect, false, 1), .decode_bytes = 224 * 1024};
  EXPECT_TRUE(PlanInfiniteHip(call).is_one_kernel);
  InfiniteHipCall other = call;
  other.decode_bytes += 1;
  EXPECT_FALSE(PlanInfiniteHip(other).is_one_kernel);
  other = call;
  other.chooses_by_layer = true;
  EXPECT_FALSE(PlanInfiniteHip(other).is_one_kernel);
  EXPECT_EQ(TextOf(PlanInfiniteHip(other)), TextOf(kSelect) +
                                                ": products for few queries, the first choice, "
                                                "later stages in a kernel for each step");
  other = call;
  other.is_chunk_indexed = true;
  EXPECT_EQ(TextOf(PlanInfiniteHip(other)), TextOf(kSelect) +
                                                ": scores of chunks where they stand, the first "
                                                "choice, later stages in one kernel");
}

TEST(KernelPlans, TokenSelectDividesARowByTheDeviceNotByTheBatch) {
  using Logits = TokenSelectPlan::Logits;
  const TokenSelectPlan plan = PlanTokenSelect(kSelect, Scope::kKvGroup, 8, 132);
  EXPECT_EQ(plan.logits, Logits::kOneTile);
  EXPECT_EQ(plan.logit_ctas_of_row, 33);
  EXPECT_EQ(plan.voters, 4);
  SelectShape shape = kSelect;
  shape.rows = 1000;
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 8, 132).logit_ctas_of_row, 33);
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 1, 132).logit_ctas_of_row, 256);
  shape.max_pages = 9;  // 4 pages a CTA at least
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 8, 132).logit_ctas_of_row, 3);
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 512, 132).logit_ctas_of_row, 1);
}

TEST(KernelPlans, TokenSelectHasVariantsForGroups) {
  using Logits = TokenSelectPlan::Logits;
  SelectShape shape = kSelect;
  shape.group = 5;
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 8, 132).logits, Logits::kTwoTiles);
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kKvGroup, 8, 132).voters, 8);
  EXPECT_EQ(PlanTokenSelect(shape, Scope::kLayer, 8, 132).voters, 0);
  shape.kv = kF32;
  EXPECT_EQ(TextOf(PlanTokenSelect(shape, Scope::kLayer, 8, 132)),
            TextOf(shape) + ": plain logits in 33 CTAs a row, votes of the layer");
}

TEST(KernelPlans, TopPHasMoreCtasARowWhereRowsAreFew) {
  SelectShape shape = kSelect;
  for (const auto& [rows, ctas] :
       {std::pair<int64_t, unsigned>{1, 8}, {16, 8}, {17, 4}, {32, 4}, {64, 2}, {65, 1}}) {
    shape.rows = rows;
    EXPECT_EQ(PlanTopP(shape, 600, 4096).ctas_of_row, ctas) << rows;
  }
  shape.rows = 16;
  EXPECT_EQ(TextOf(PlanTopP(shape, 600, 40'000)),
            TextOf(shape) +
                ": 8 CTAs a row, 1 heads a CTA, weights of 16384 tokens in shared memory, 160 "
                "pages at once");
  shape.rows = 128;
  const TopPPlan plan = PlanTopP(shape, 600, 40'002);
  EXPECT_EQ(plan.heads_of_cta, 4u);
  EXPECT_EQ(plan.shared_tokens, 4096u);
  EXPECT_EQ(plan.items_at_once, 256);
}

}  // namespace
}  // namespace kvasir::kernels
