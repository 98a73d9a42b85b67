// Requests and comparisons of the tests of engine.h, with the policies of
// TestWorker::DefaultOptions by name.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/random_model_fixture.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {

inline constexpr uint32_t kAll = 0, kStreaming = 1, kQuest = 2, kAllThenQuest = 3, kTokenSelect = 4,
                          kHip = 5, kInfiniteHip = 6, kPruned = 7, kHipByInterval = 8,
                          kTokenSelectByCosine = 9, kInfiniteHipByBoth = 10,
                          kTerminated = 13;  // policies

inline std::vector<uint32_t> RandomPrompt(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> prompt(static_cast<size_t>(size));
  for (uint32_t& token : prompt) token = static_cast<uint32_t>(random() % 101);
  return prompt;
}

inline TestRequest MakeRequest(int64_t prompt_size, uint32_t policy, uint32_t seed = 7) {
  return MakeSparseRequest(RandomPrompt(prompt_size, seed), policy);
}

using AllLogits = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

// Bit by bit: -0 is not 0, and NaN equals itself.
inline void ExpectSameBits(const AllLogits& expected, const AllLogits& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [place, logits] : expected) {
    const auto found = actual.find(place);
    ASSERT_NE(found, actual.end()) << "no logits at position " << place.second;
    ASSERT_EQ(std::memcmp(logits.data(), found->second.data(), logits.size() * sizeof(float)), 0)
        << "slot " << place.first << ", position " << place.second;
  }
}

class EngineTest : public RandomModelFixture {
 protected:
  // Returns the logits of one request in an engine of its own.
  static AllLogits RunAlone(const TestRequest& request, int64_t chunk = 128,
                            const EngineOptions& options = TestWorker::DefaultOptions()) {
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = chunk});
    coordinator.Add(request);
    worker.Run(coordinator);
    return worker.logits();
  }
};

}  // namespace kvasir::worker
