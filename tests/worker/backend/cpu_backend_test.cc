// Properties of a backend that the model relies on and that the engine's tests would not isolate.
#include "worker/backend/cpu/cpu_backend.h"

#include <limits>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/base/executor.h"
#include "worker/parallel/single_collective.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::TensorView;

constexpr int64_t kHeadDim = 4;

// Rows of two, one and three tokens.
StepBatch ThreeRows() {
  StepBatch batch;
  batch.tokens = {1, 2, 3, 4, 5, 6};
  batch.positions = {7, 8, 0, 3, 4, 5};
  batch.row_begins = {0, 2, 3, 6};
  batch.sampled_tokens = {1, 5};
  return batch;
}

// Rank 1 of three. The others answer at once, each with 100 times its rank more in every element.
class ThreeRanks final : public Collective {
 public:
  int rank() const override { return 1; }
  int size() const override { return 3; }
  absl::Duration timeout() const override { return absl::Seconds(1); }
  absl::Status AllReduceSum(absl::Span<float> data) override {
    for (float& element : data) element = 3 * element;
    return absl::OkStatus();
  }
  absl::Status AllGather(absl::Span<const float> in, absl::Span<float> out) override {
    for (size_t r = 0; r < 3; ++r) {
      for (size_t i = 0; i < in.size(); ++i) {
        out[r * in.size() + i] = in[i] + 100 * (static_cast<float>(r) - 1);
      }
    }
    return absl::OkStatus();
  }
};

class CpuBackendTest : public testing::Test {
 protected:
  std::unique_ptr<Rope> MakeRope(const KeyForm& form) {
    return backend_.MakeRope({.inv_freq = {1, 0.1}}, form).value();
  }
  void BeginStep(Rope& rope) { BeginStep(rope, collective_); }
  void BeginStep(Rope& rope, Collective& ranks) {
    const StepInputs step = {.batch = batch_,
                             .kv = kv_,
                             .rope = rope,
                             .shard = shard_,
                             .meter = meter_,
                             .collective = ranks};
    ASSERT_TRUE(backend_.BeginStep(step).ok());
  }
  // [tokens, width] of ones.
  TensorView Ones(std::vector<float>& memory, int64_t width) const {
    memory.assign(static_cast<size_t>(batch_.num_tokens() * width), 1);
    return TensorView(memory.data(), DType::kFloat32, {batch_.num_tokens(), width});
  }

  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
  StepBatch batch_ = ThreeRows();
  const kernels::PagedKv kv_ = {
      .layout = {.num_layers = 1, .head_dim = kHeadDim, .dtype = DType::kFloat32}, .accesses = {}};
  const ShardPlan shard_;
  AttentionMeter meter_{0};
  SingleCollective collective_;
};

TEST_F(CpuBackendTest, PiecesAreWrittenWhereTheyLie) {
  const Memory memory = backend_.Allocate(300).value();
  std::vector<MemoryPiece> pieces;
  for (int64_t i = 0; i < 3; ++i) pieces.push_back({memory.data() + 100 * i, 100});
  const absl::Status filled = backend_.FillPieces(pieces, [&](int64_t piece, int, std::byte* out) {
    EXPECT_EQ(out, pieces[static_cast<size_t>(piece)].begin);
    return piece == 0 ? absl::OkStatus() : absl::DataLossError("after the first");
  });
  EXPECT_EQ(filled, absl::DataLossError("after the first"));
}

TEST_F(CpuBackendTest, AnyTokenOfARowFailsItAndNoOther) {
  const std::unique_ptr<Rope> rope = MakeRope({});
  std::vector<float> residual, logits;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    BeginStep(*rope);
    const StepOutputs outputs = {.residual = Ones(residual, 3), .logits = Ones(logits, 2)};
    residual[4 * 3 + 2] = bad;  // not the last token of the third row
    StepResult result;
    ASSERT_TRUE(backend_.EndStep(outputs).ok());
    ASSERT_TRUE(backend_.Collect(result).ok());
    EXPECT_EQ(result.row_is_finite, (std::vector<uint8_t>{1, 1, 0}));
  }
}

TEST_F(CpuBackendTest, SamplesAsTheBatchSaysAndKeepsLogitsWhereTheyAreWanted) {
  const std::unique_ptr<Rope> rope = MakeRope({});
  const std::vector<int32_t> banned = {1};
  batch_.sampling = {{}, {.banned = banned}, {}};
  std::vector<float> residual;
  std::vector<float> logits = {1, 3, 2, 1, 3, 2, std::numeric_limits<float>::quiet_NaN(), 0, 0};
  const TensorView view(logits.data(), DType::kFloat32, {3, 3});
  for (const bool keeps : {false, true}) {
    batch_.keeps_logits = keeps;
    BeginStep(*rope);
    ASSERT_TRUE(backend_.Sample(view).ok());
    StepResult result;
    ASSERT_TRUE(backend_.EndStep({.residual = Ones(residual, 3), .logits = view}).ok());
    ASSERT_TRUE(backend_.Collect(result).ok());
    ASSERT_EQ(result.tokens.size(), 3u);
    EXPECT_EQ(result.tokens[0].token, 1);
    EXPECT_EQ(result.tokens[1].token, 2);
    EXPECT_EQ(result.tokens[2].status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(result.logits.data(), keeps ? logits.data() : nullptr);
  }
}

TEST_F(CpuBackendTest, OnlyKeysThatAreCachedRotatedAreRotated) {
  for (const bool rotated : {true, false}) {
    const std::unique_ptr<Rope> rope = MakeRope({.rotated = rotated});
    BeginStep(*rope);
    std::vector<float> qkv;  // for one query head
    std::vector<float> x(static_cast<size_t>(batch_.num_tokens() * kHeadDim));
    const auto heads = [&](int64_t count) {
      return TensorView(x.data(), DType::kFloat32, {batch_.num_tokens(), count, kHeadDim});
    };
    const absl::Status status = backend_.AppendHeads(
        {.qkv = Ones(qkv, kHeadDim), .q = heads(1), .k = heads(0), .v = heads(0)});
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t t = 0; t < batch_.num_tokens(); ++t) {
      const bool turned = x[static_cast<size_t>(t * kHeadDim)] != 1;
      const bool at_origin = batch_.positions[static_cast<size_t>(t)] == 0;
      EXPECT_EQ(turned, rotated && !at_origin) << "token " << t;
    }
  }
}

TEST_F(CpuBackendTest, SampledRowsAreTakenInTheirOrder) {
  const std::unique_ptr<Rope> rope = MakeRope({});
  BeginStep(*rope);
  std::vector<float> x, y(4);
  const TensorView rows = Ones(x, 2);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  ASSERT_TRUE(backend_.TakeSampled(rows, TensorView(y.data(), DType::kFloat32, {2, 2})).ok());
  EXPECT_EQ(y, (std::vector<float>{2, 3, 10, 11}));
}

TEST_F(CpuBackendTest, SumsOverRanksAreRoundedAndAdded) {
  ThreeRanks ranks;
  const std::unique_ptr<Rope> rope = MakeRope({});
  BeginStep(*rope, ranks);
  const float third = 1 + 0x1p-9f;  // not a bfloat16
  std::vector<float> x = {third, 2};
  std::vector<kernels::BFloat16> y = {kernels::BFloat16(0), kernels::BFloat16(512)};
  ASSERT_TRUE(backend_
                  .AddOverRanks(TensorView(x.data(), DType::kFloat32, {1, 2}),
                                TensorView(y.data(), DType::kBFloat16, {1, 2}))
                  .ok());
  EXPECT_EQ(static_cast<float>(y[0]), static_cast<float>(kernels::BFloat16(3 * third)));
  EXPECT_EQ(static_cast<float>(y[1]), static_cast<float>(kernels::BFloat16(512 + 6)));
}

// The last rank has two columns where the others have three: its rows are packed.
TEST_F(CpuBackendTest, ColumnsOfRanksStandSideBySide) {
  ThreeRanks ranks;
  const std::unique_ptr<Rope> rope = MakeRope({});
  BeginStep(*rope, ranks);
  std::vector<float> own = {101, 102, 103, 104, 105, 106}, gathered(18), y(16);
  const TensorView own_view(own.data(), DType::kFloat32, {2, 3});
  const TensorView gathered_view(gathered.data(), DType::kFloat32, {6, 3});
  ASSERT_TRUE(backend_
                  .GatherColumns({.own = own_view,
                                  .gathered = gathered_view,
                                  .y = TensorView(y.data(), DType::kFloat32, {2, 8})})
                  .ok());
  EXPECT_EQ(y, (std::vector<float>{1, 2, 3, 101, 102, 103, 201, 202,  //
                                   4, 5, 6, 104, 105, 106, 203, 204}));
  // Only the second and third rank.
  std::vector<float> two(12);
  ASSERT_TRUE(backend_
                  .GatherColumns({.own = own_view,
                                  .gathered = gathered_view,
                                  .y = TensorView(two.data(), DType::kFloat32, {2, 6}),
                                  .first_rank = 1})
                  .ok());
  EXPECT_EQ(two, (std::vector<float>{101, 102, 103, 201, 202, 203, 104, 105, 106, 204, 205, 206}));
}

// An embedding is the largest of all weights: there is no room for two.
TEST_F(CpuBackendTest, PlacedWeightsAreNotCopied) {
  Tensor weight = {.memory = backend_.Allocate(16).value(), .view = {}};
  weight.view = TensorView(weight.memory.data(), DType::kFloat32, {4});
  const void* const before = weight.view.data();
  const Tensor placed = backend_.Place(std::move(weight)).value();
  EXPECT_EQ(placed.view.data(), before);
  EXPECT_EQ(placed.memory.data(), before);
}

}  // namespace
}  // namespace kvasir::worker
