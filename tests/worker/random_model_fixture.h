// A fixture whose suites load a random model once: tests of one suite share it, and make their own
// engines over it.
#pragma once

#include <memory>

#include "gtest/gtest.h"

#include "tests/worker/random_model.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {

class RandomModelFixture : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<RandomModel>();
    model_ = std::make_unique<TestModel>(
        TestWorkerOptions{.folder = folder_->folder(), .edit_weights = {}});
  }
  static void TearDownTestSuite() {
    model_.reset();
    folder_.reset();
  }

  static inline std::unique_ptr<RandomModel> folder_;
  static inline std::unique_ptr<TestModel> model_;
};

}  // namespace kvasir::worker
