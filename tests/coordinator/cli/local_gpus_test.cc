#include "coordinator/cli/local_gpus.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using testing::HasSubstr;

TEST(LocalGpusTest, EachWorkerGetsAGpuOfItsOwn) {
  EXPECT_EQ(ChooseGpus(2, {.visible = {}, .count = 8}).value(),
            (std::vector<std::string>{"0", "1"}));
}

TEST(LocalGpusTest, OnlyThoseThatAreVisibleAreGivenAway) {
  const std::vector<std::string> visible = {"5", "GPU-1234", "2"};
  EXPECT_EQ(ChooseGpus(2, {.visible = visible, .count = 8}).value(),
            (std::vector<std::string>{"5", "GPU-1234"}));
}

TEST(LocalGpusTest, TooFewAreRefusedWithWhatWasFound) {
  const auto refused = [](const LocalGpus& gpus) {
    const absl::Status status = ChooseGpus(4, gpus).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refused({.visible = {}, .count = 2}), HasSubstr("this machine has 2"));
  EXPECT_THAT(refused({.visible = std::vector<std::string>{"0", "1", "3"}, .count = 8}),
              HasSubstr("CUDA_VISIBLE_DEVICES names 3"));
}

TEST(LocalGpusTest, WhereNothingIsKnownWorkersFindOut) {
  EXPECT_EQ(ChooseGpus(2, {}).value(), (std::vector<std::string>{"0", "1"}));
}

}  // namespace
}  // namespace kvasir::coordinator
