// The fixture that tests of the engine loop share: a loop, a group of one rank on paper, and a
// clock that the test moves.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

#include "coordinator/engine_loop.h"
#include "tests/coordinator/collected_response.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_worker_group.h"

namespace kvasir::coordinator {

using kvasir::testing::FakeClock;
using kvasir::testing::FakeWorkerGroup;
using kvasir::testing::SymbolicWorker;

class EngineLoopTest : public ::testing::Test {
 protected:
  ~EngineLoopTest() override {
    group_.ReleaseSteps();
    group_.ReleaseForms();
    loop_.Stop(absl::UnavailableError("the test is over"));
    EXPECT_EQ(group_.illegal_plan(), absl::OkStatus());
  }

  static EngineLoopOptions Options() {
    EngineLoopOptions options;
    options.scheduler.set_max_num_seqs(4);
    options.scheduler.set_max_num_batched_tokens(128);
    options.scheduler.set_max_queue_len(4);
    options.scheduler.set_max_queued_tokens(100000);
    options.scheduler.set_max_request_time(3600);
    options.scheduler.set_enable_prefix_caching(true);
    return options;
  }
  void StartAndAwaitReady() {
    loop_.Start();
    ASSERT_EQ(loop_.WaitUntilReady(clock_.Now() + std::chrono::hours(1)), absl::OkStatus());
  }

  struct Submitted {
    SequenceId id;
    std::shared_ptr<CollectedResponse> response;
  };
  Submitted Submit(std::vector<int32_t> prompt, int64_t max_tokens,
                   std::vector<std::string> stop = {}) {
    return Submit(
        {.prompt = std::move(prompt), .max_tokens = max_tokens, .stop_strings = std::move(stop)});
  }
  // Of a request with a dense policy.
  Submitted Submit(ParsedRequest parsed) {
    Submitted submitted = {.id = loop_.NewSequenceId(),
                           .response = std::make_shared<CollectedResponse>()};
    const std::string name = absl::StrCat("r", submitted.id.value);
    parsed.policy.prefill.mutable_all();
    parsed.policy.decode.mutable_all();
    absl::StatusOr<std::unique_ptr<Request>> request =
        Request::Create(std::move(parsed), {.tokenizer = *model_.tokenizer,
                                            .metrics = metrics_,
                                            .id = *running_.Acquire({.id = name}),
                                            .sink = submitted.response,
                                            .sequence = submitted.id,
                                            .origin = {.request_id = name, .arrived = clock_.Now()},
                                            .policy = "default"});
    loop_.Submit(*std::move(request));
    return submitted;
  }
  std::string MetricsText() {
    return prometheus::TextSerializer().Serialize(metrics_.registry().Collect());
  }

  TestModel model_;
  FakeClock clock_;
  Metrics metrics_{"test", {"default"}};
  RunningRequests running_;
  // A small vocabulary, all of it ASCII.
  FakeWorkerGroup group_{
      {.max_num_seqs = 4, .max_num_batched_tokens = 128, .vocab_size = 128, .disk_blocks = 50}};
  EngineLoop loop_{Options(), group_, clock_, metrics_};
};

}  // namespace kvasir::coordinator
