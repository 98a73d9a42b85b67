// Random operations. Each request must be answered as if it were alone.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"
#include "tests/support/iterations.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::Iterations;

struct Asked {
  std::vector<int32_t> expected;  // tokens, unless it is cancelled
  bool cancelled = false;
};

class RandomSchedulerTest : public SchedulerTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  void AddRandom() {
    // Few documents, so that prefixes are shared; cut anywhere, so that block edges are hit.
    const auto document = static_cast<int32_t>(1 + Random(3));
    std::vector<int32_t> prompt = Prompt(1 + Random(400), document);
    const int64_t question = Random(3) == 0 ? 0 : Random(100);
    for (int64_t i = 0; i < question; ++i) prompt.push_back(static_cast<int32_t>(Random(kVocab)));
    // Sometimes an earlier prompt and part of its answer, so that answers are read as prompts.
    if (Random(3) == 0 && !conversation_.empty()) {
      prompt = conversation_;
      prompt.resize(static_cast<size_t>(1 + Random(static_cast<int64_t>(prompt.size()))));
    }
    SequenceSpec spec = Spec(std::move(prompt), 1 + Random(80));
    spec.sampling.set_seed(static_cast<uint64_t>(Random(2)));
    for (int64_t i = Random(3); i > 0; --i) {
      spec.sampling.add_stop_token_ids(static_cast<uint32_t>(Random(kVocab)));
    }
    spec.sampling.set_min_tokens(static_cast<uint32_t>(Random(2) * Random(20)));
    spec.sampling.set_min_tokens(
        std::min(spec.sampling.min_tokens(), static_cast<uint32_t>(spec.max_tokens)));
    const uint32_t tails[] = {0, 1, 64, 100};
    if (Random(3) == 0) spec.policy = SparsePolicy(tails[Random(4)]);
    if (Random(4) == 0) {
      spec.policy.prefill.mutable_streaming();
      spec.policy.prefill.set_window_tokens(64);
    }
    if (Random(5) == 0) spec.tenant = "other";
    Asked asked = {.expected = Expected(spec)};
    if (Random(3) == 0 && spec.prompt.size() < 400) {
      conversation_ = spec.prompt;
      conversation_.insert(conversation_.end(), asked.expected.begin(), asked.expected.end());
    }
    if (Random(5) == 0) {  // a client has a part of the answer
      spec.answer = asked.expected;
      spec.answer.resize(static_cast<size_t>(Random(std::ssize(asked.expected))));
    }
    spec.is_read_elsewhere = elsewhere_ && Random(2) == 0;
    const SequenceId id = spec.id;
    tokens_[id] = spec.answer;
    const absl::Status status = scheduler_->Add(std::move(spec));
    if (status.ok()) {
      asked_.emplace(id, std::move(asked));
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    }
  }

  void CancelRandom(bool stop) {
    if (asked_.empty()) return;
    const SequenceId id(Random(next_id_));
    std::optional<FinishEvent> finish =
        stop ? scheduler_->StopEarly(id, now_)
             : scheduler_->Cancel(id, absl::CancelledError("client"), now_);
    EXPECT_EQ(finish.has_value(), asked_.contains(id) && !finished_.contains(id));
    if (!finish.has_value()) return;
    asked_.at(id).cancelled = true;
    Collect({*std::move(finish)});
  }

  // Runs a step, during which sequences may be cancelled, and reports what the disk has done.
  void RandomStep() {
    now_ += std::chrono::milliseconds(Random(50));
    RunPlan();
    const v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kSome, random_());
    ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
  }
  // Makes a plan, perhaps ahead of an answer; the rank carries it out now or when it is waited for.
  void RunPlan() {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    if (planned.plan.has_value()) plans_.push_back(*std::move(planned.plan));
    if (Random(2) == 0) ExecutePlans();
    if (Random(10) == 0) CancelRandom(false);
    if (Random(20) == 0) CancelRandom(true);
    const bool may_wait = planned.plan.has_value() && scheduler_->unanswered_plans() == 1;
    if (scheduler_->unanswered_plans() > 0 && !(may_wait && Random(4) > 0)) TakeAnswer();
  }
  void ExecutePlans() {
    while (!plans_.empty()) {
      absl::StatusOr<v1::StepReply> reply = worker_->Execute(plans_.front());
      ASSERT_TRUE(reply.ok()) << reply.status() << "\n"
                              << plans_.front().ShortDebugString().substr(0, 2000);
      replies_.push_back(*std::move(reply));
      plans_.pop_front();
    }
  }
  void TakeAnswer() {
    if (replies_.empty()) ExecutePlans();
    ASSERT_FALSE(replies_.empty());
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(replies_.front(), now_);
    ASSERT_TRUE(events.ok()) << events.status();
    replies_.pop_front();
    Collect(*std::move(events));
  }
  // Returns the number of sequences that were preempted with the group.
  int64_t LoseGroup(const SymbolicWorkerOptions& worker) {
    plans_.clear();
    replies_.clear();  // some that the ranks gave may never have come
    return Survive(worker);
  }
  void Finish() {
    while (scheduler_->unanswered_plans() > 0) {
      TakeAnswer();
      if (HasFatalFailure()) return;
    }
    RunUntilIdle();
    EXPECT_GT(scheduler_->stats().plans_ahead, 0);
    EXPECT_GT(scheduler_->stats().rows_in_vain, 0);
  }

  void CheckAnswers() const {
    for (const auto& [id, asked] : asked_) {
      ASSERT_TRUE(finished_.contains(id)) << id;
      const auto it = tokens_.find(id);
      const std::vector<int32_t> got = it == tokens_.end() ? std::vector<int32_t>() : it->second;
      if (asked.cancelled) {
        ASSERT_LE(got.size(), asked.expected.size());
        ASSERT_TRUE(std::equal(got.begin(), got.end(), asked.expected.begin())) << id;
      } else {
        ASSERT_EQ(got, asked.expected) << id;
        ASSERT_EQ(finished_.at(id).status, absl::OkStatus());
      }
    }
    ASSERT_EQ(finished_.size(), asked_.size());
  }

  int64_t Random(int64_t below) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }

  std::mt19937_64 random_{GetParam()};
  bool elsewhere_ = false;  // half of the prompts are read elsewhere
  std::map<SequenceId, Asked> asked_;
  std::vector<int32_t> conversation_;
  std::deque<v1::StepPlan> plans_;     // that the rank has not carried out
  std::deque<v1::StepReply> replies_;  // that the scheduler has not taken
};

TEST_P(RandomSchedulerTest, EveryRequestEndsOnceWithTheAnswerItGetsAlone) {
  const SymbolicWorkerOptions worker = {.device_blocks = 1 + Random(24),
                                        .host_blocks = 10 + Random(60),
                                        .max_num_seqs = 1 + Random(8),
                                        .max_num_batched_tokens = 64 * (1 + Random(6))};
  SchedulerOptions options = Options(worker);
  options.max_queue_len = Random(20);
  Make(worker, options);
  for (int64_t i = Iterations(2000); i > 0; --i) {
    const int64_t dice = Random(100);
    if (dice < 15) {
      AddRandom();
    } else if (dice < 20) {
      CancelRandom(Random(2) == 0);
    } else if (dice < 22) {
      worker_->LoseOneBlock(random_());
    } else {
      RandomStep();
    }
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  EXPECT_LE(worker_->num_blocks(), scheduler_->stats().index.idle_blocks);
  EXPECT_EQ(scheduler_->GiveUp().stats().waiting, 0);
}

// Blocks go to disk, are evicted from memory, come back, or do not.
TEST_P(RandomSchedulerTest, TheDiskChangesNoAnswer) {
  Make({.host_blocks = 12, .max_num_seqs = 3, .disk_blocks = 10 + Random(100)});
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(4) == 0) AddRandom();
    if (Random(20) == 0) CancelRandom(false);
    if (Random(50) == 0) worker_->LoseOneBlock(random_());
    if (Random(200) == 0) now_ += std::chrono::seconds(11);  // what is on its way is late
    RandomStep();
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  EXPECT_GT(worker_->reads(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  EXPECT_LE(worker_->num_blocks(), scheduler_->stats().index.idle_blocks);
}

// Answers of up to 80 tokens, and blocks for two or three of the requests.
TEST_P(RandomSchedulerTest, PreemptionChangesNoAnswer) {
  Make({.host_blocks = 13 + Random(4), .max_num_seqs = 8, .disk_blocks = Random(2) * 50});
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(3) == 0 && scheduler_->stats().waiting < 8) AddRandom();
    if (Random(30) == 0) CancelRandom(false);
    if (Random(100) == 0) worker_->LoseOneBlock(random_());
    RandomStep();
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_GT(stats.preempted_swap + stats.preempted_recompute, 0);
  EXPECT_GT(stats.resumed_disk + stats.resumed_host + stats.resumed_recompute, 0);
  EXPECT_EQ(stats.index.held_blocks, 0);
}

// Groups are lost again and again, with plans unanswered or half answered. What the disk has
// written is there for the next one.
TEST_P(RandomSchedulerTest, LostGroupsChangeNoAnswer) {
  const SymbolicWorkerOptions worker = {
      .host_blocks = 16 + Random(30), .max_num_seqs = 6, .disk_blocks = Random(2) * 50};
  Make(worker);
  int64_t preempted = 0;
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(4) == 0) AddRandom();
    if (Random(30) == 0) CancelRandom(false);
    RandomStep();
    if (Random(40) == 0) preempted += LoseGroup(worker);
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  while (scheduler_->unanswered_plans() > 0) {
    TakeAnswer();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  RunUntilIdle();
  CheckAnswers();
  EXPECT_GT(preempted, 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

// Other servers read half of the prompts, and tell how far, true or not. Peers have the beginnings
// of all documents.
TEST_P(RandomSchedulerTest, ReadersElsewhereChangeNoAnswer) {
  Make({.host_blocks = 200, .disk_blocks = 200});
  for (const int32_t document : {1, 2, 3}) Add(Spec(Prompt(64 * (1 + Random(6)), document), 1));
  RunUntilIdle();
  const std::unique_ptr<SymbolicWorker> peer = std::move(worker_);
  Make({.host_blocks = 16 + Random(30), .max_num_seqs = 6, .has_peers = true});
  worker_->AskPeer(*peer);
  finished_.clear();
  elsewhere_ = true;
  const auto end = [this](int64_t id) {
    scheduler_->EndReadElsewhere(
        SequenceId(id),
        Random(2) == 0 ? Scheduler::Elsewhere::kRead : Scheduler::Elsewhere::kFailed, now_);
  };
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(4) == 0) AddRandom();
    if (Random(30) == 0) CancelRandom(false);
    if (Random(50) == 0) worker_->LoseOneBlock(random_());
    for (int64_t told = Random(3); told > 0 && next_id_ > 0; --told) {
      scheduler_->ReadElsewhere(SequenceId(next_id_ - 1 - Random(std::min<int64_t>(8, next_id_))),
                                Random(500));
    }
    if (Random(6) == 0 && next_id_ > 0) end(Random(next_id_));
    RandomStep();
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  for (int64_t id = 0; id < next_id_; ++id) end(id);
  Finish();
  while (scheduler_->stats().restoring > 0) {  // those that ask again
    now_ += std::chrono::milliseconds(100);
    RunUntilIdle();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  CheckAnswers();
  EXPECT_GT(worker_->reads(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSchedulerTest, ::testing::Range(1u, 17u));

}  // namespace
}  // namespace kvasir::coordinator
