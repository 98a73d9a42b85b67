#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/attention/attend.h"
#include "kernels/sparse/art/art_terminator.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/policy.h"
#include "tests/support/attend_implementations.h"
#include "tests/support/compare.h"
#include "tests/support/local_attention_batch.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr int64_t kLayer = AttentionShape{}.layer;
constexpr double kNoTest = std::numeric_limits<double>::infinity();
constexpr int64_t kNeverPatient = int64_t{1} << 20;
constexpr PolicyNumbers kNumbers = {.sink_tokens = 40, .window_tokens = 130, .patience = 5};

// One rule for all blocks.
void Terminate(AttentionBatch& batch, const Terminator* terminator,
               const PolicyNumbers& numbers = kNumbers) {
  std::vector<Termination> terminations;
  for (const QueryTile& tile : batch.blocks()) {
    terminations.push_back(MakeTermination(terminator, tile, numbers));
  }
  batch.SetTerminations(std::move(terminations));
}

int64_t Unread(const AttentionBatch& batch, int64_t block = 0, int64_t head = 0) {
  return batch.unread(block, head).device + batch.unread(block, head).host;
}

std::vector<float> Out(const AttentionBatch& batch) {
  std::vector<float> out;
  for (int64_t token = 0; token < batch.num_tokens(); ++token) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      out.insert(out.end(), batch.out(token, head),
                 batch.out(token, head) + batch.shape().head_dim);
      out.push_back(batch.lse(token, head));
    }
  }
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// |out - expected| / |expected| of the first head.
double RelativeError(const AttentionBatch& batch, const std::vector<float>& expected) {
  double error = 0, length = 0;
  for (int64_t i = 0; i < batch.shape().head_dim; ++i) {
    const double x = static_cast<double>(expected[static_cast<size_t>(i)]);
    error += std::pow(static_cast<double>(batch.out(0, 0)[i]) - x, 2);
    length += x * x;
  }
  return std::sqrt(error / length);
}

class ArtTest : public ::testing::TestWithParam<AttendImplementation> {
 protected:
  void Run(AttentionBatch& batch) { batch.Run(GetParam().run); }
  // Returns the batch's output when every page is read.
  std::vector<float> RunWhole(AttentionBatch& batch) {
    Terminate(batch, nullptr);
    Run(batch);
    return Out(batch);
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, ArtTest, ::testing::ValuesIn(AttendImplementations()),
                         [](const auto& param) { return param.param.name; });

// Rows of many lengths, some of them local by `peak`, in one batch.
AttentionBatch MixedBatch(const AttentionShape& shape, Keys keys, float peak = 40) {
  AttentionBatch batch = MakeBatch(shape, keys, 4, 6000, 51);
  AddLocalBlock(batch, 0, 3000, 200, peak);
  AddLocalBlock(batch, 1, 5900, 700, peak);
  batch.FillContext(2, 4100);
  batch.AddBlock(2, 4099, 1);  // nothing local
  AddLocalBlock(batch, 3, 1000, 70, peak);
  return batch;
}

std::vector<AttentionShape> Shapes() {
  return {{.activation = DType::kFloat32, .kv = DType::kFloat32, .head_dim = 64, .group = 2},
          {.activation = DType::kFloat32, .kv = DType::kBFloat16, .head_dim = 128, .group = 4},
          {.activation = DType::kBFloat16, .kv = DType::kBFloat16, .head_dim = 128, .group = 7},
          {.activation = DType::kFloat32, .kv = DType::kFloat32, .head_dim = 24, .group = 1}};
}

std::vector<std::pair<AttentionShape, Keys>> ShapesAndKeys() {
  std::vector<std::pair<AttentionShape, Keys>> all;
  for (const AttentionShape& shape : Shapes()) {
    for (const Keys keys : kBothKeys) all.emplace_back(shape, keys);
  }
  return all;
}

TEST_P(ArtTest, PatienceThatIsNeverReachedLeavesEveryBit) {
  const ArtTerminator art({.guard = ArtOptions::Guard::kNone,
                           .scale_tolerance = 0.1,
                           .direction_tolerance = 0.1,
                           .mass_tolerance = 0.1});
  for (const auto& [shape, keys] : ShapesAndKeys()) {
    AttentionBatch batch = MixedBatch(shape, keys, 8);
    const std::vector<float> whole = RunWhole(batch);
    Terminate(batch, &art);
    Run(batch);
    ASSERT_GT(Unread(batch, 0), 0);  // it does end rows of this batch, and what is left matters
    EXPECT_FALSE(SameBits(Out(batch), whole));
    PolicyNumbers numbers = kNumbers;
    // The last one is at work to the end (rows of patience + 3 pages are watched), in vain.
    for (const int64_t patience : {kNeverPatient, int64_t{100}, int64_t{88}}) {
      numbers.patience = patience;
      Terminate(batch, &art, numbers);
      Run(batch);
      for (int64_t block = 0; block < 4; ++block) EXPECT_EQ(Unread(batch, block), 0);
      EXPECT_TRUE(SameBits(Out(batch), whole)) << "patience " << patience;
    }
  }
}

TEST_P(ArtTest, NeverEndsBeforePatienceAndOnePages) {
  for (int64_t patience = 1; patience <= 45; patience += 4) {
    AttentionBatch batch({.kv_heads = 1, .group = 1}, 1, 3200, 52);
    AddLocalBlock(batch, 0, 3200, 20, 60);  // all but the newest page are calm
    const ArtTerminator art({});
    PolicyNumbers numbers = kNumbers;
    numbers.window_tokens = 1;
    numbers.patience = patience;
    Terminate(batch, &art, numbers);
    Run(batch);
    // Page 0 of the 50 pages is the sink.
    EXPECT_EQ(Unread(batch), 49 >= patience + 3 ? 49 - (patience + 1) : 0) << patience;
  }
}

TEST_P(ArtTest, WithoutTheScaleTestItEndsTooEarly) {
  // Values share a direction, so that their sum grows along it: the direction says nothing.
  AttentionBatch batch({.kv = DType::kFloat32, .kv_heads = 1, .group = 1}, 1, 8192, 53);
  batch.FillContext(0, 8192);
  for (int64_t t = 0; t < 8192; ++t) {
    std::byte* value = batch.kv().Token(Side::kValue, 0, t, kLayer, 0);
    for (int64_t i = 0; i < 64; ++i) {
      const float shared = t < 6000 ? -3.0f : 3.0f;
      batch.kv().Set(value, i, shared + 0.1f * batch.kv().Get(value, i));
    }
  }
  batch.AddBlock(0, 8191, 1);
  const std::vector<float> whole = RunWhole(batch);
  const ArtOptions paper = {.probe = ArtOptions::Probe::kRaw, .guard = ArtOptions::Guard::kNone};
  const ArtTerminator with(paper);
  Terminate(batch, &with);
  Run(batch);
  EXPECT_EQ(Unread(batch), 0);
  ArtOptions no_scale = paper;
  no_scale.scale_tolerance = kNoTest;
  const ArtTerminator without(no_scale);
  Terminate(batch, &without);
  Run(batch);
  EXPECT_GT(Unread(batch), 110);  // of 128 pages
  EXPECT_GT(RelativeError(batch, whole), 1);
}

TEST_P(ArtTest, AFarNeedleIsMissedWithoutTheGuardAndKeptWithIt) {
  constexpr int64_t kNeedle = 2047;  // at a quarter of the context, in page 31
  for (const auto& [shape, keys] : ShapesAndKeys()) {
    AttentionBatch batch = MakeBatch(shape, keys, 1, 8192, 54);
    AddLocalBlock(batch, 0, 8192, 200, 40);
    AddPeak(batch, 0, kNeedle, kNeedle + 1, 50);
    const std::vector<float> whole = RunWhole(batch);
    const ArtTerminator unguarded({.guard = ArtOptions::Guard::kNone});
    Terminate(batch, &unguarded);
    Run(batch);
    EXPECT_GT(Unread(batch), 110);
    EXPECT_GT(RelativeError(batch, whole), 0.5);
    const ArtTerminator guarded({});
    Terminate(batch, &guarded);
    Run(batch);
    EXPECT_GT(Unread(batch), 0);   // it ends, but
    EXPECT_LT(Unread(batch), 31);  // after the needle was read
    EXPECT_LT(RelativeError(batch, whole), 1e-2);
  }
}

TEST_P(ArtTest, TheNormalisedProbeSeesMassWhoseValuesAreZero) {
  AttentionBatch batch({.kv = DType::kFloat32, .kv_heads = 1, .group = 1}, 1, 8192, 55);
  AddLocalBlock(batch, 0, 8192, 8000, 0);  // flat
  for (int64_t t = 0; t < 8000; ++t) {
    std::byte* value = batch.kv().Token(Side::kValue, 0, t, kLayer, 0);
    for (int64_t i = 0; i < 64; ++i) batch.kv().Set(value, i, 0);
  }
  const std::vector<float> whole = RunWhole(batch);
  const ArtTerminator raw({.probe = ArtOptions::Probe::kRaw, .guard = ArtOptions::Guard::kNone});
  Terminate(batch, &raw);
  Run(batch);
  EXPECT_GT(RelativeError(batch, whole), 2);
  const ArtTerminator normalised({.guard = ArtOptions::Guard::kNone});
  Terminate(batch, &normalised);
  Run(batch);
  EXPECT_LT(RelativeError(batch, whole), 1e-2);
}

TEST_P(ArtTest, WhatIsUnreadIsNotAskedAndTheWholeSinkIs) {
  for (const auto& [dtype, sink] :
       {std::pair(DType::kFloat32, 40), std::pair(DType::kBFloat16, 200)}) {
    AttentionBatch batch({.activation = dtype, .kv = dtype}, 1, 3000, 56);
    AddLocalBlock(batch, 0, 3000, 200, 40);
    const ArtTerminator art({});
    PolicyNumbers numbers = kNumbers;
    numbers.sink_tokens = sink;
    Terminate(batch, &art, numbers);
    Run(batch);
    const std::vector<float> out = Out(batch);
    const int64_t unread = Unread(batch, 0, 0);
    ASSERT_GT(unread, 10);
    ASSERT_EQ(Unread(batch, 0, 1), unread);
    // NaN in it, or no page at all, change nothing.
    const int64_t first = CeilPages(sink);
    for (int64_t t = kPageTokens * first; t < kPageTokens * (first + unread); ++t) {
      for (const Side side : {Side::kKey, Side::kValue}) {
        batch.kv().Set(batch.kv().Token(side, 0, t, kLayer, 1), 3,
                       std::numeric_limits<float>::quiet_NaN());
      }
    }
    for (int64_t page = first; page < first + unread; ++page) {
      batch.kv().SetTier(0, page, kLayer, 0, PageTier::kAbsent);
    }
    batch.kv().SetTier(0, first, kLayer, 1, PageTier::kHost);
    batch.kv().SetTier(0, 46, kLayer, 1, PageTier::kHost);
    Run(batch);
    EXPECT_EQ(batch.fault(0), 0);
    EXPECT_TRUE(SameBits(Out(batch), out));
    EXPECT_EQ(batch.unread(0, 1).host, 1);
    EXPECT_EQ(batch.unread(0, 1).device, unread - 1);
    for (int64_t page = 0; page < 47; ++page) {
      const bool read = page < first || page >= first + unread;
      EXPECT_EQ(batch.kv().last_touched(0, page, kLayer, 1), read ? 1u : 0u) << "page " << page;
    }
    EXPECT_EQ(batch.kv().missed_bytes(0, first, kLayer, 1), 0u);
    EXPECT_GT(batch.kv().missed_bytes(0, 46, kLayer, 1), 0u);
  }
}

TEST_P(ArtTest, ARowEndsWhereItEndsAloneWhateverTheThreads) {
  for (const auto& [shape, keys] : ShapesAndKeys()) {
    AttentionBatch batch = MixedBatch(shape, keys);
    const ArtTerminator art({});
    Terminate(batch, &art);
    Run(batch);
    const std::vector<float> out = Out(batch);
    tests::ThreadExecutor threads(3);
    batch.Run(GetParam().run, threads);
    EXPECT_TRUE(SameBits(Out(batch), out));

    AttentionBatch alone = MakeBatch(shape, keys, 4, 6000, 51);
    AddLocalBlock(alone, 0, 3000, 200, 40);  // the same numbers: the first that are drawn
    Terminate(alone, &art);
    Run(alone);
    EXPECT_EQ(Unread(alone), Unread(batch));
    const std::vector<float> first = Out(alone);
    EXPECT_TRUE(SameBits(first, {out.begin(), out.begin() + std::ssize(first)}));
  }
}

TEST_P(ArtTest, NanIsNeverCalm) {
  AttentionBatch batch({.kv = DType::kFloat32, .kv_heads = 1, .group = 2}, 1, 3000, 57);
  AddLocalBlock(batch, 0, 3000, 200, 40);
  batch.q(0, 1)[7] = std::numeric_limits<float>::quiet_NaN();
  const ArtTerminator art({.guard = ArtOptions::Guard::kNone});
  Terminate(batch, &art);
  Run(batch);
  EXPECT_EQ(Unread(batch), 0);
  EXPECT_FALSE(std::isnan(batch.out(0, 0)[0]));
  EXPECT_TRUE(std::isnan(batch.out(0, 1)[0]));
}

TEST_P(ArtTest, AnInfiniteBoundHoldsARowBack) {
  AttentionBatch batch({.kv = DType::kFloat32, .kv_heads = 1, .group = 1}, 1, 3000, 58);
  AddLocalBlock(batch, 0, 3000, 200, 40);
  std::byte* key = batch.kv().Token(Side::kKey, 0, 500, kLayer, 0);
  const bool up = batch.q(0, 0)[5] > 0;
  const float infinity = std::numeric_limits<float>::infinity();
  batch.kv().Set(key, 5, up ? infinity : -infinity);
  ASSERT_TRUE(RebuildBounds(batch.kv().View(), 0, 500 / kPageTokens, kPageTokens).ok());
  const ArtTerminator art({});
  Terminate(batch, &art);
  Run(batch);
  EXPECT_LT(Unread(batch), 8);
}

TEST(ArtTerminatorTest, ImplementationsEndRowsAlike) {
  for (const auto& [shape, keys] : ShapesAndKeys()) {
    AttentionBatch reference = MixedBatch(shape, keys);
    const ArtTerminator art({});
    Terminate(reference, &art);
    reference.Run(AttendReference);
    ASSERT_GT(Unread(reference, 1), 10);
    for (const AttendImplementation& implementation : AttendImplementations()) {
      AttentionBatch batch = MixedBatch(shape, keys);
      Terminate(batch, &art);
      batch.Run(implementation.run);
      for (int64_t block = 0; block < 4; ++block) {
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
          EXPECT_EQ(Unread(batch, block, head), Unread(reference, block, head)) << block;
        }
      }
      const double tolerance = shape.activation == DType::kFloat32 ? 2e-5 : 2e-2;
      EXPECT_TRUE(tests::AllClose(Out(batch), Out(reference),
                                  {.absolute = tolerance, .relative = tolerance}))
          << implementation.name;
    }
  }
}

TEST_P(ArtTest, TheWindowOfAListIsItsHeaders) {
  // As one that grew: a selection that serves for many steps.
  AttentionBatch batch({.kv = DType::kFloat32, .kv_heads = 1, .group = 1}, 1, 6400, 61);
  std::vector<SelectionEntry> entries;
  for (int64_t page = 1; page < 60; ++page) {
    entries.push_back({.page = page, .chosen = ~uint64_t{0}, .live = ~uint64_t{0}});
  }
  batch.FillContext(0, 6400);
  batch.AddBlock(0, 6399, 1, [&](int64_t) { return SelectList(40, 80 * kPageTokens, entries); });
  batch.q(0, 0)[0] = kPeakQuery;
  AddPeak(batch, 0, 0, 6300, 0);
  AddPeak(batch, 0, 6300, 6400, 40);
  const ArtTerminator art({.guard = ArtOptions::Guard::kNone});
  Terminate(batch, &art);  // of a window of 130 tokens
  Run(batch);
  EXPECT_EQ(Unread(batch), 59);
  for (int64_t page = 80; page < 100; ++page) {
    EXPECT_EQ(batch.kv().last_touched(0, page, kLayer, 0), 1u) << "page " << page;
  }
}

TEST(ArtTerminatorTest, ShortContextsAreReadWhole) {
  const ArtTerminator art({});
  const QueryTile tile = {.num_rows = 1, .first_position = 999};
  PolicyNumbers numbers = {.sink_tokens = 100, .window_tokens = 200, .budget_tokens = 700};
  EXPECT_EQ(MakeTermination(&art, tile, numbers).terminator, nullptr);
  numbers.budget_tokens = 699;
  const Termination termination = MakeTermination(&art, tile, numbers);
  EXPECT_EQ(termination.terminator, &art);
  EXPECT_EQ(termination.sink_end, 100);
  EXPECT_EQ(termination.window_begin, 800);
}

TEST(ArtTerminatorTest, BlocksOfMoreThanOneQueryAreRefused) {
  AttentionBatch batch({}, 1, 640, 59);
  batch.FillContext(0, 640);
  batch.AddBlock(0, 576, 64);
  const ArtTerminator art({});
  Terminate(batch, &art, {.sink_tokens = 1, .window_tokens = 1, .patience = 1});
  batch.Run([](const AttendParams& p, Executor& executor) {
    const absl::Status status = Attend(p, executor);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("64 queries; a terminator needs one"), std::string::npos);
  });
}

TEST(ArtTerminatorTest, OptionsThatItDoesNotHaveAreNamed) {
  const auto message = [](const MethodOptions& options) {
    return std::string(MakeTerminator("art", options).status().message());
  };
  EXPECT_EQ(message({{"probe", "raw"},
                     {"guard", "none"},
                     {"scale", "relative"},
                     {"order", "importance"},
                     {"scale_tolerance", "0.25"}}),
            "");
  EXPECT_EQ(message({{"probe", "x"}}), "art: probe is 'x'; there is normalised, raw");
  EXPECT_EQ(message({{"mass_tolerance", "2"}}),
            "art: mass_tolerance is '2'; it is above 0, at most 1");
  EXPECT_NE(message({{"tau", "1"}}).find("art has no option 'tau'; it has probe"),
            std::string::npos);
  EXPECT_EQ(MakeTerminator("tra").status().message(),
            "unknown terminator 'tra'; the terminators are art");
}

}  // namespace
}  // namespace kvasir::kernels
