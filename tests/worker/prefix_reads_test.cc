#include "worker/engine/prefix_reads.h"

#include <gtest/gtest.h>
#include <vector>

namespace kvasir::worker {
namespace {

// A prefix of ten blocks, and `rest` tokens after it, of which the last `tail` are read one by one.
class PrefixReadsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kPrefix = 640;

  PrefixReadsTest() {
    dense_.mutable_all();
    sparse_.mutable_quest();
    streaming_.mutable_streaming();
  }
  bool Reads(const v1::AttentionPolicy& prefill, const v1::AttentionPolicy& decode, int64_t rest,
             int64_t tail) {
    sequence_.kv_length = kPrefix;
    sequence_.given_size = kPrefix + rest;
    sequence_.decode_begin = kPrefix + rest - tail;
    return ReadWholePrefix(sequence_, {prefill, sequence_.prefill}, {decode, sequence_.decode},
                           num_layers_, windows_);
  }
  // What a query chooses: a sink, its window and a budget.
  static kernels::PolicyNumbers Numbers(int64_t budget) {
    return {.sink_tokens = 8, .window_tokens = 32, .budget_tokens = budget};
  }

  v1::AttentionPolicy dense_, sparse_, streaming_;
  Sequence sequence_;
  int64_t num_layers_ = 1;
  std::vector<int64_t> windows_;
};

TEST_F(PrefixReadsTest, OneDenseQueryReadsEverything) {
  EXPECT_TRUE(Reads(dense_, sparse_, 1, 0));
  EXPECT_TRUE(Reads(sparse_, dense_, 1, 1));
}

TEST_F(PrefixReadsTest, SparseQueriesReadWhatTheyMayChoose) {
  sequence_.prefill.numbers = Numbers(88);  // 128 in all
  EXPECT_TRUE(Reads(sparse_, dense_, 5 * 64, 0));
  EXPECT_FALSE(Reads(sparse_, dense_, 4 * 64, 0));
  EXPECT_TRUE(Reads(sparse_, dense_, 4 * 64 + 1, 0)) << "a part of a tile reads as much";
  sequence_.prefill.numbers = Numbers(10'000);
  EXPECT_TRUE(Reads(sparse_, dense_, 1, 0));
}

TEST_F(PrefixReadsTest, TokensOfTheTailReadOneByOne) {
  sequence_.decode.numbers = Numbers(24);  // 64 in all
  EXPECT_TRUE(Reads(sparse_, sparse_, 10, 10));
  EXPECT_FALSE(Reads(sparse_, sparse_, 9, 9));
  // A sequence that starts again has tokens after its prompt, all of which are read so.
  sequence_.prompt_size = 100;
  EXPECT_TRUE(Reads(dense_, sparse_, 10, 10));
  EXPECT_FALSE(Reads(dense_, sparse_, 9, 9));
}

TEST_F(PrefixReadsTest, AWindowLeavesThePrefix) {
  sequence_.prefill.numbers = Numbers(0);
  EXPECT_FALSE(Reads(streaming_, dense_, 100'000, 0)) << "40 tokens of the prefix at most";
  sequence_.prefill.numbers.window_tokens = 632;
  EXPECT_TRUE(Reads(streaming_, dense_, 64, 0));
}

TEST_F(PrefixReadsTest, LayersCountEach) {
  num_layers_ = 2;
  windows_ = {64, 0};
  EXPECT_FALSE(Reads(dense_, dense_, 64, 0)) << "64 and 640 of twice 640 tokens";
  EXPECT_TRUE(Reads(dense_, dense_, 128, 0)) << "64 and 1,280";
  windows_ = {};
  sequence_.prefill.numbers = Numbers(88);
  EXPECT_FALSE(Reads(sparse_, dense_, 4 * 64, 0));
  sequence_.prefill.dense_layers = 1;
  EXPECT_TRUE(Reads(sparse_, dense_, 4 * 64, 0)) << "2,560 and 512";
  sequence_.prefill.dense_layers = 0;
  sequence_.prefill.layer_budgets = {{.begin = 1, .end = 2, .budget_tokens = 152}};
  EXPECT_TRUE(Reads(sparse_, dense_, 4 * 64, 0)) << "512 and 768";
}

}  // namespace
}  // namespace kvasir::worker
