// The engine over a reference model on the CPU and on a GPU: the models, the text that prompts are
// taken from, and runs of requests over one of the models. Tests need a GPU and skip without.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "tests/worker/cuda/cuda_engine_policies.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {

inline constexpr int64_t kAnswer = 16;

// Returns the text of 8000 tokens that prompts are pieces of.
inline const std::vector<uint32_t>& Text() {
  static const std::vector<uint32_t> text =
      GoldenFile("tests/model/golden/needle-8k.safetensors").Run(8000).tokens;
  return text;
}

// Budgets are so small that most of the text is skipped.
inline TestRequest MakeRequest(int64_t begin, int64_t size, uint32_t policy) {
  const std::vector<uint32_t>& text = Text();
  KVASIR_CHECK(begin + size <= std::ssize(text));
  TestRequest request = {.prompt = {text.begin() + begin, text.begin() + begin + size},
                         .max_tokens = kAnswer,
                         .policy = policy,
                         .prefill = MakeNumbers(32, 128, 256),
                         .decode = MakeNumbers(16, 128, 128, policy == 2 ? 2 : 0),
                         .tail_tokens = 20,
                         .sampling = Greedy(),
                         .cached_blocks = {}};
  if (Prunes(policy)) request.decode.set_top_p(0.9f);
  if (Ends(policy)) request.decode.set_patience(3);
  if (policy == kEndingByImportance) request.decode.set_token_budget(2048);  // many pages
  if (Reuses(policy)) {
    v1::ReusePolicy& reuse = *request.decode.mutable_reuse();
    // infinitehip's stages have intervals 8, 8 and 4.
    reuse.set_interval(policy >= kFirstReusing + 4 ? 8 : 3);
    reuse.set_theta(0.8f);
    reuse.set_theta_force(0.5f);
    reuse.set_max_age(5);
  }
  return request;
}

struct ServedRun {
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;  // by slot and position
  std::vector<TestResult> results;
  kvstore::KvStoreStats stats;
};

// Serves at most num_slots requests at a time, request r in slot r % num_slots.
inline ServedRun Serve(TestModel& model, const std::vector<TestRequest>& requests,
                       int64_t num_slots = kSlots, const EngineOptions& options = Options()) {
  TestWorker worker(model, options);
  TestCoordinator coordinator({.num_slots = num_slots, .chunk = kChunk});
  for (const TestRequest& request : requests) coordinator.Add(request);
  worker.Run(coordinator);
  ServedRun run = {
      .logits = worker.logits(), .results = {}, .stats = worker.engine().store().stats()};
  for (size_t r = 0; r < requests.size(); ++r) run.results.push_back(coordinator.result(r));
  return run;
}

// A model on both sides. The CPU's can round its attention differently.
struct ModelPair {
  std::unique_ptr<TestModel> cpu;
  std::unique_ptr<TestModel> gpu;
};

// One suite in several files.
class CudaEngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return;
    models_ = MakeModels(PositionExtension::kNone);
    extended_models_ = MakeModels(PositionExtension::kStreaming);
    grouped_models_ = MakeModels(PositionExtension::kSelfExtend, kGrouped);
    windowed_models_ = MakeModels(PositionExtension::kNone, {}, {97, 0, 0, 333, 0, 97});
  }
  static void TearDownTestSuite() {
    models_ = {};
    extended_models_ = {};
    grouped_models_ = {};
    windowed_models_ = {};
  }
  void SetUp() override {
    if (models_.gpu == nullptr) GTEST_SKIP() << "no GPU on this machine";
  }

  static inline ModelPair models_;
  static inline ModelPair extended_models_;
  static inline ModelPair grouped_models_;
  static inline ModelPair windowed_models_;  // windows in some layers

 private:
  static ModelPair MakeModels(PositionExtension extension,
                              const kernels::GroupedPositions& grouped = {},
                              const std::vector<int64_t>& windows = {}) {
    return {.cpu = MakeModel("cpu", extension, grouped, windows),
            .gpu = MakeModel("cuda", extension, grouped, windows)};
  }
  static std::unique_ptr<TestModel> MakeModel(const std::string& device,
                                              PositionExtension extension,
                                              const kernels::GroupedPositions& grouped,
                                              const std::vector<int64_t>& windows) {
    return std::make_unique<TestModel>(TestWorkerOptions{.folder = "tests/model/needle-8k",
                                                         .dtype = kernels::DType::kBFloat16,
                                                         .max_model_len = 16384,
                                                         .extension = extension,
                                                         .grouped = grouped,
                                                         .layer_windows = windows,
                                                         .num_threads = 4,
                                                         .device = device,
                                                         .can_round = device == "cpu",
                                                         .edit_weights = {}});
  }
};

}  // namespace kvasir::worker
