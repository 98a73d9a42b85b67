#include "worker/loaded_model.h"

#include <cmath>
#include <cstdint>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/executor.h"
#include "tests/worker/random_model.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/engine/engine.h"
#include "worker/parallel/single_collective.h"

namespace kvasir::worker {
namespace {

using testing::HasSubstr;

class LoadedModelTest : public testing::Test {
 protected:
  absl::StatusOr<LoadedModel> Load(const std::string& dtype, const std::string& weights_dtype) {
    LoadModelOptions options;
    options.progress = [](absl::string_view, double) {};
    options.model.set_model(folder_.folder());
    options.model.set_dtype(dtype);
    options.model.set_weights_dtype(weights_dtype);
    return LoadModel(options, backend_);
  }

  // Returns the logits of the first token after a prompt that is read in chunks of this many
  // tokens.
  std::vector<float> FirstLogits(const std::string& dtype, const std::string& weights_dtype,
                                 int64_t chunk = 512) {
    const LoadedModel loaded = Load(dtype, weights_dtype).value();
    SingleCollective single;
    const auto engine =
        Engine::Create(TestWorker::DefaultOptions(), *loaded.transformer, single).value();
    std::vector<float> first;
    engine->set_logits_tap([&](int64_t, int64_t, std::span<const float> logits) {
      if (first.empty()) first.assign(logits.begin(), logits.end());
    });
    TestCoordinator coordinator({.chunk = chunk});
    std::vector<uint32_t> prompt(200);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * i % 101);
    const size_t request = coordinator.Add(MakeSparseRequest(prompt, 0));
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      coordinator.Apply(plan, engine->Step(plan).value());
    }
    EXPECT_TRUE(coordinator.result(request).status.ok());
    return first;
  }

  RandomModel folder_;
  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
};

// Returns the root of the sum of squared differences, as a share of that of `expected`.
double Distance(const std::vector<float>& actual, const std::vector<float>& expected) {
  double difference = 0, all = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    all += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / all);
}

TEST_F(LoadedModelTest, Int8WeightsAnswerAlmostAsTheWeightsDo) {
  for (const std::string dtype : {"float32", "bfloat16"}) {
    const std::vector<float> exact = FirstLogits(dtype, "auto");
    const std::vector<float> rounded = FirstLogits(dtype, "int8");
    ASSERT_EQ(rounded.size(), exact.size());
    EXPECT_GT(Distance(rounded, exact), 1e-4) << dtype;
    EXPECT_LT(Distance(rounded, exact), 0.1) << dtype;
  }
}

TEST_F(LoadedModelTest, ChunksDoNotChangeLogitsOfInt8Weights) {
  EXPECT_EQ(FirstLogits("bfloat16", "int8", 64), FirstLogits("bfloat16", "int8", 512));
}

TEST_F(LoadedModelTest, KvOfInt8WeightsIsOfAnotherModel) {
  const LoadedModel exact = Load("bfloat16", "auto").value();
  EXPECT_EQ(Load("bfloat16", "").value().weights_hash, exact.weights_hash);
  EXPECT_NE(Load("bfloat16", "int8").value().weights_hash, exact.weights_hash);
}

TEST_F(LoadedModelTest, UnknownWeightsDtypeIsRefused) {
  const absl::Status status = Load("auto", "int4").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("weights_dtype 'int4'"));
}

}  // namespace
}  // namespace kvasir::worker
