// What the model relies on in a backend and the engine's tests would not single out.
#include "worker/backend/cpu_backend.h"

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

class CpuBackendTest : public testing::Test {
 protected:
  std::unique_ptr<Rope> MakeRope(const KeyForm& form) {
    return backend_.MakeRope({.inv_freq = {1, 0.1}}, form).value();
  }
  void BeginStep(Rope& rope) {
    const StepInputs step = {.batch = batch_,
                             .kv = kv_,
                             .rope = rope,
                             .shard = shard_,
                             .meter = meter_,
                             .collective = collective_};
    ASSERT_TRUE(backend_.BeginStep(step).ok());
  }
  // [tokens, width] of ones.
  TensorView Ones(std::vector<float>& memory, int64_t width) const {
    memory.assign(static_cast<size_t>(batch_.num_tokens() * width), 1);
    return TensorView(memory.data(), DType::kFloat32, {batch_.num_tokens(), width});
  }

  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
  const StepBatch batch_ = ThreeRows();
  const kernels::PagedKv kv_;
  const ShardPlan shard_;
  AttentionMeter meter_{0};
  SingleCollective collective_;
};

TEST_F(CpuBackendTest, AnyTokenOfARowFailsItAndNoOther) {
  const std::unique_ptr<Rope> rope = MakeRope({});
  std::vector<float> residual, delta, logits;
  for (const bool in_residual : {true, false}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      BeginStep(*rope);
      const StepOutputs outputs = {
          .residual = Ones(residual, 3), .delta = Ones(delta, 3), .logits = Ones(logits, 2)};
      (in_residual ? residual : delta)[4 * 3 + 2] = bad;  // not the last token of the third row
      StepResult result;
      ASSERT_TRUE(backend_.EndStep(outputs, result).ok());
      EXPECT_EQ(result.row_is_finite, (std::vector<uint8_t>{1, 1, 0}));
      EXPECT_EQ(result.logits.data(), logits.data());
    }
  }
}

TEST_F(CpuBackendTest, OnlyKeysThatAreCachedRotatedAreRotated) {
  for (const bool rotated : {true, false}) {
    const std::unique_ptr<Rope> rope = MakeRope({.rotated = rotated});
    BeginStep(*rope);
    std::vector<float> x;
    Ones(x, kHeadDim);
    ASSERT_TRUE(
        backend_.Rotate(TensorView(x.data(), DType::kFloat32, {batch_.num_tokens(), 1, kHeadDim}))
            .ok());
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

// An embedding is the largest of all weights: there is no room for two.
TEST_F(CpuBackendTest, PlacedWeightsAreNotCopied) {
  HostTensor weight = {.memory = kernels::HostBuffer::Allocate(16).value(), .view = {}};
  weight.view = TensorView(weight.memory.data(), DType::kFloat32, {4});
  const void* const before = weight.view.data();
  const Tensor placed = backend_.Place(std::move(weight)).value();
  EXPECT_EQ(placed.view.data(), before);
  EXPECT_EQ(placed.memory.data(), before);
}

}  // namespace
}  // namespace kvasir::worker
