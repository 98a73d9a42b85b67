// The forward pass against logits that transformers computed with the same weights
// (tests/model/make_random_models.py).
#include "worker/model/transformer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/model/test_files.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include <nlohmann/json.hpp>

namespace kvasir::worker {
namespace {

struct Golden {
  std::vector<uint32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<std::vector<double>> logits;
};

Golden ReadGolden(const std::string& folder) {
  const auto json = nlohmann::json::parse(ReadFile(folder + "/golden.json"));
  return {
      .tokens = json.at("tokens"), .positions = json.at("positions"), .logits = json.at("logits")};
}

class TransformerGoldenTest : public testing::TestWithParam<const char*> {};

// Every recorded position is the end of a prompt of its own: the engine gives logits there only.
TEST_P(TransformerGoldenTest, LogitsAgreeWithTransformers) {
  const std::string folder = std::string(kTestData) + "/" + GetParam();
  const Golden golden = ReadGolden(folder);
  const auto model =
      TestWorker::LoadTransformer({.folder = folder, .max_model_len = 512, .edit_weights = {}});
  for (size_t i = 0; i < golden.positions.size(); ++i) {
    TestWorker worker(*model);
    TestCoordinator coordinator({.chunk = 64});
    const int64_t position = golden.positions[i];
    coordinator.Add({.prompt = {golden.tokens.begin(), golden.tokens.begin() + position + 1},
                     .max_tokens = 1,
                     .prefill = {},
                     .decode = {},
                     .sampling = Greedy(),
                     .cached_blocks = {}});
    worker.Run(coordinator);
    const TestWorker::Logits& logits = worker.logits().at({0, position});
    ASSERT_EQ(logits.size(), golden.logits[i].size());
    double largest = 0, difference = 0;
    for (size_t j = 0; j < logits.size(); ++j) {
      largest = std::max(largest, std::abs(golden.logits[i][j]));
      difference = std::max(difference, std::abs(golden.logits[i][j] - double{logits[j]}));
    }
    EXPECT_LE(difference, 1e-4 * largest) << "position " << position;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TransformerGoldenTest,
                         testing::Values("tiny-llama", "tiny-llama-tied"));

}  // namespace
}  // namespace kvasir::worker
