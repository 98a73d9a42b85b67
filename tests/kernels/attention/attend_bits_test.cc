// A row has the same bits in any block, batch, order and segment, and with any instruction set.
#include <algorithm>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kernels/attention/attend.h"
#include "tests/kernels/attention/attend_fixture.h"
#include "tests/kernels/attention/attend_oracle.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::ThreadExecutor;
using Side = FakePagedKv::Side;

TEST_P(AttendTest, ADecodeRowHasTheBitsOfTheSameRowInAPrefillBlock) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    constexpr uint64_t kSeed = 31;
    AttentionBatch prefill(shape, 1, 2304, kSeed);
    AttentionBatch decode(shape, 1, 2304, kSeed);
    prefill.FillContext(0, 2304);
    decode.FillContext(0, 2304);
    prefill.AddBlock(0, 2176, 64);
    for (int64_t row = 0; row < 64; ++row) decode.AddBlock(0, 2176 + row, 1);
    for (int64_t row = 0; row < 64; ++row) CopyQuery(prefill, row, decode, row);
    Run(prefill);
    Run(decode);
    for (int64_t row = 0; row < 64; ++row) ExpectSameRow(prefill, row, decode, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, CuttingABlockDoesNotChangeItsRows) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch whole(shape, 1, 2304, 32);
    AttentionBatch cut(shape, 1, 2304, 32);
    whole.FillContext(0, 2304);
    cut.FillContext(0, 2304);
    if (shape.group == 7) {  // both kinds of positions
      whole.UseCompactPositions();
      cut.UseCompactPositions();
    }
    const auto select = [](int64_t) { return SelectList(100, 2000, {Whole(3), Whole(20)}); };
    whole.AddBlock(0, 2240, 64, select);
    for (const auto& [begin, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 1}, {6, 33}, {39, 2}, {41, 23}}) {
      cut.AddBlock(0, 2240 + begin, rows, select);
    }
    for (int64_t row = 0; row < 64; ++row) CopyQuery(whole, row, cut, row);
    Run(whole);
    Run(cut);
    for (int64_t row = 0; row < 64; ++row) ExpectSameRow(whole, row, cut, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, NeighboursInTheBlockDoNotChangeARow) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 1, 512, 33);
    AttentionBatch other(shape, 1, 512, 33);
    batch.FillContext(0, 512);
    other.FillContext(0, 512);
    batch.AddBlock(0, 448, 64);
    other.AddBlock(0, 448, 64);
    for (int64_t row = 0; row < 64; ++row) {
      CopyQuery(batch, row, other, row);
      if (row % 4 == 1) continue;
      for (int64_t head = 0; head < other.heads(); ++head) other.q(row, head)[row % 64] = 1e30f;
    }
    Run(batch);
    Run(other);
    for (int64_t row = 1; row < 64; row += 4) ExpectSameRow(batch, row, other, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, AListOfEverythingHasTheBitsOfAll) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch all(shape, 1, 2304, 34);
    AttentionBatch list(shape, 1, 2304, 34);
    all.FillContext(0, 2304);
    list.FillContext(0, 2304);
    for (const auto& [first, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 64}, {2303, 1}, {2240, 64}, {2053, 7}}) {
      all.AddBlock(0, first, rows);
      list.AddBlock(0, first, rows, [&](int64_t) { return ListOfEverything(first); });
    }
    for (int64_t row = 0; row < all.num_tokens(); ++row) CopyQuery(all, row, list, row);
    Run(all);
    Run(list);
    for (int64_t row = 0; row < all.num_tokens(); ++row) ExpectSameRow(all, row, list, row);
    if (HasFailure()) return;
  }
}

// Runs items in a scrambled order and under changing thread numbers.
class ScrambledExecutor : public Executor {
 public:
  ScrambledExecutor(int threads, uint64_t seed) : threads_(threads), rng_(seed) {}
  void ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) override {
    largest_loop_ = std::max(largest_loop_, n);
    std::vector<int64_t> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), rng_);
    for (const int64_t i : order)
      body(i, static_cast<int>(rng_() % static_cast<uint64_t>(threads_)));
  }
  int num_threads() const override { return threads_; }
  int64_t largest_loop() const { return largest_loop_; }

 private:
  const int threads_;
  int64_t largest_loop_ = 0;
  std::mt19937_64 rng_;
};

TEST_P(AttendTest, ThreadsTiersAndBatchDoNotChangeARow) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.group != 7) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch alone(shape, 2, 4500, 35);
    AttentionBatch batched(shape, 2, 4500, 35);
    alone.FillContext(0, 4500);
    batched.FillContext(0, 4500);
    batched.FillContext(1, 300);
    alone.AddBlock(0, 4499, 1);
    batched.AddBlock(1, 256, 40);
    batched.AddBlock(0, 4499, 1);
    batched.AddBlock(1, 299, 1);
    CopyQuery(alone, 0, batched, 40);
    for (int64_t block = 0; block < 70; block += 3) {
      batched.kv().SetTier(0, block, AttentionBatch::kLayer, 0, PageTier::kHost);
    }
    Run(alone);
    for (const int threads : {1, 2, 3, 16}) {
      ScrambledExecutor executor(threads, 36);
      batched.Run(GetParam().run, executor);
      ExpectSameRow(alone, 0, batched, 40);
    }
    if (HasFailure()) return;
  }
}

// Long rows are cut into segments when threads would idle. Lists are, too: their segments may hold
// only the first page, only the last page, or none.
TEST_P(AttendTest, CuttingALongListIntoSegmentsDoesNotChangeIt) {
  AttentionBatch whole({.kv_heads = 1, .group = 2}, 1, 12000, 45);
  whole.FillContext(0, 12000);
  whole.AddBlock(0, 11999, 1, [](int64_t) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 0; page <= 31; ++page) entries.push_back(Whole(page));
    entries.push_back(Whole(32));   // the first page of segment 2, alone
    entries.push_back(Whole(127));  // the last page of segment 4, alone; segment 3 is empty
    for (int64_t page = 130; page < 180; ++page) entries.push_back(Whole(page));
    return SelectList(0, 11900, std::move(entries));
  });
  Run(whole);
  ExpectMatchesOracle(whole);
  AttentionBatch serial({.kv_heads = 1, .group = 2}, 1, 64, 45);
  serial.CopyResults(whole);
  ScrambledExecutor executor(3, 46);
  whole.Run(GetParam().run, executor);
  ExpectSameRow(serial, 0, whole, 0);
  if (GetParam().name != "Reference") {
    EXPECT_EQ(executor.largest_loop(), 6) << "segments 0, 1, 2, 4, 5, 6";
  }
}

TEST_P(AttendTest, RealThreadsGiveTheSameBits) {
  const AttentionShape shape = {.kv = DType::kBFloat16, .kv_heads = 2, .group = 2};
  AttentionBatch batch(shape, 3, 4500, 37);
  batch.FillContext(0, 4500);
  batch.FillContext(1, 700);
  batch.AddBlock(0, 4499, 1);
  batch.AddBlock(1, 640, 60);
  batch.AddBlock(1, 699, 1, [](int64_t) { return SelectList(64, 600, {Whole(3)}); });
  batch.AddBlock(2, 10, 1);  // a slot without blocks: faults from several threads
  batch.AddBlock(2, 11, 1);
  Run(batch);
  AttentionBatch serial(shape, 3, 4500, 37);
  serial.CopyResults(batch);
  ThreadExecutor executor(4);
  for (int repetition = 0; repetition < 3; ++repetition) {
    batch.Run(GetParam().run, executor);
    for (int64_t row = 0; row < 62; ++row) ExpectSameRow(serial, row, batch, row);
    EXPECT_EQ(batch.fault(2), 1);
  }
}

// The vector exp, seen from outside: two keys with logits 0 and -x and values 0 and 1 give out =
// exp(-x) / (1 + exp(-x)).
TEST_P(AttendTest, ExpIsAccurateDownToTheSmallestFloats) {
  double worst = 0;
  AttentionBatch batch({.kv_heads = 1, .group = 1}, 1, 64, 38);
  batch.FillContext(0, 2);
  for (int64_t i = 0; i < 64; ++i) {
    batch.kv().Set(batch.kv().Token(Side::kKey, 0, 0, AttentionBatch::kLayer, 0), i, 0.0f);
    batch.kv().Set(batch.kv().Token(Side::kKey, 0, 1, AttentionBatch::kLayer, 0), i,
                   i == 0 ? -8.0f : 0.0f);  // times the scale: -1
    batch.kv().Set(batch.kv().Token(Side::kValue, 0, 0, AttentionBatch::kLayer, 0), i, 0.0f);
    batch.kv().Set(batch.kv().Token(Side::kValue, 0, 1, AttentionBatch::kLayer, 0), i, 1.0f);
  }
  std::vector<float> xs = {0.0f, 1e-6f, 0.3465f, 0.34658f, 86.9f, 87.2f, 103.0f, 105.0f, 1e4f};
  for (float x = 0; x < 87; x += 0.0371f) xs.push_back(x);
  for (size_t i = 0; i < xs.size(); ++i) batch.AddBlock(0, 1, 1);
  for (size_t i = 0; i < xs.size(); ++i) batch.q(static_cast<int64_t>(i), 0)[0] = xs[i];
  Run(batch);
  for (size_t i = 0; i < xs.size(); ++i) {
    const double weight = std::exp(-double{xs[i]});
    const double expected = weight / (1 + weight);
    const double found = batch.out(static_cast<int64_t>(i), 0)[0];
    if (expected < 1.2e-38) {
      EXPECT_NEAR(found, expected, 1.5e-45) << "denormal, x = " << xs[i];
    } else {
      worst = std::max(worst, std::abs(found - expected) / expected);
    }
  }
  EXPECT_LT(worst, 3e-7) << "2 ulp of exp, and the rounding of the sum and the division";
}

TEST_P(AttendTest, TheSecondCallNeedsNoMoreScratch) {
  AttentionBatch batch({}, 1, 4500, 39);
  batch.FillContext(0, 4500);
  batch.AddBlock(0, 4499, 1);
  batch.AddBlock(0, 4416, 64);
  ScrambledExecutor executor(3, 40);
  batch.Run(GetParam().run, executor);
  const int64_t bytes = batch.scratch_bytes();
  batch.Run(GetParam().run, executor);
  EXPECT_EQ(batch.scratch_bytes(), bytes);
}

// Chains of products and the order of sums are the same for vectors of any width. All forms that
// multiply floats give the same bits, so a machine with only AVX2 answers like one with AVX-512.
TEST(Attend, InstructionSetsGiveTheSameBits) {
  for (const int64_t head_dim : {64, 128}) {
    const AttentionShape shape = {.kv = DType::kBFloat16, .head_dim = head_dim, .group = 3};
    AttentionBatch batch(shape, 2, 2300, 51);
    batch.FillContext(0, 2300);
    batch.FillContext(1, 300);
    batch.AddBlock(0, 2299, 1);
    batch.AddBlock(1, 200, 70);  // pages that some queries see only in part
    batch.AddBlock(0, 2200, 1, [](int64_t) {
      return SelectList(64, 2100, {{.page = 5, .chosen = 0x10f0, .live = 0x10f0}, Whole(9)});
    });
    std::optional<AttentionBatch> first;
    SerialExecutor executor;
    for (const AttendImplementation& form : AttendImplementations()) {
      if (form.name == "Reference" || form.name == CpuIsaName(CpuIsa::kAvx512Bf16)) continue;
      batch.Run(form.run, executor);
      if (!first.has_value()) {
        first.emplace(shape, 2, 64, 51);
        first->CopyResults(batch);
        continue;
      }
      SCOPED_TRACE(form.name);
      for (int64_t row = 0; row < 72; ++row) ExpectSameRow(*first, row, batch, row);
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
