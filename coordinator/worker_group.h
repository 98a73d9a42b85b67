// The tensor-parallel ranks as one: formed together, stepping together, failing together. Hidden:
// the streams, the handshake, relaying the ranks' rendezvous, bounded waits, and comparing their
// answers. Owned and called by the engine loop's thread; what other threads may call says so.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/clock.h"
#include "coordinator/worker_client.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// What all ranks have in common; capacities are those of the smallest.
struct GroupInfo {
  uint64_t epoch = 0;
  std::string weights_hash;
  std::string kv_form;
  int64_t device_blocks = 0;
  int64_t host_blocks = 0;
  int64_t disk_blocks = 0;
  int64_t attention_parity_tokens = 0;
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
  int64_t trained_window = 0;  // as in v1::Ready, like the following
  v1::MassUnmeasured mass_unmeasured = v1::MASS_UNMEASURED_UNSPECIFIED;
  std::vector<std::string> addresses;  // by rank
  std::vector<v1::Ready> ranks;        // by rank
};

// What one rank says of its disk tier.
struct RankTierReport {
  int64_t rank = 0;
  v1::TierReport report;
};

// An interface because tests of the engine loop and of the service play a group.
class WorkerGroup {
 public:
  virtual ~WorkerGroup() = default;

  // Forms the group anew under the next epoch; blocks until every rank is ready. The error of the
  // rank that failed, naming it; NOT_FOUND, naming them, for ranks that do not answer; INTERNAL
  // when the ranks do not fit each other.
  virtual absl::StatusOr<GroupInfo> Form() = 0;
  // All ranks carry out the plan, behind those sent before. An error as of AwaitReply.
  virtual absl::Status Send(const v1::StepPlan& plan) = 0;
  // Blocks for the ranks' common answer to the oldest unanswered plan. After an error the group is
  // gone: UNAVAILABLE for a rank that is dead or too slow, INTERNAL for ranks that disagree.
  // REQUIRES: a plan is unanswered.
  virtual absl::StatusOr<v1::StepReply> AwaitReply() = 0;
  // What the ranks have said of their disk tiers since the last call, in order; behind Form all
  // that they store.
  virtual std::vector<RankTierReport> TakeTierReports() = 0;
  // Ends the group: the ranks drop their sequences.
  virtual void Disband() = 0;

  // Any thread. Form, Send and AwaitReply, now and in future, return CANCELLED.
  virtual void Interrupt() = 0;
  // Before Form. Called on any thread, once per formed group, when a rank is lost between steps.
  virtual void SetLossCallback(std::function<void(const absl::Status&)> on_loss) = 0;
  // Before Form. Called by Form, on its thread, with what it waits for, for people.
  virtual void SetProgressCallback(std::function<void(const std::string&)> on_progress) = 0;
  // Before Form. Called on any thread when there are tier reports to take.
  virtual void SetTierReportCallback(std::function<void()> on_report) = 0;
};

struct WorkerGroupOptions {
  std::vector<std::string> addresses;  // by rank
  // Without epoch and rank, which the group fills in.
  v1::ShardPlan shard_plan;
  // So long every rank may take to answer at all while the group forms.
  absl::Duration answer_timeout = absl::Seconds(30);
  // A rank that has answered and is silent for so long while the group forms has failed: loading
  // reports its progress, but hashing a large model from a slow disk may take minutes.
  absl::Duration form_silence = absl::Minutes(10);
  // A step may take so long from when its answer is waited for: 1024 sequences or a chunk behind
  // millions of tokens on a slow machine.
  absl::Duration step_timeout = absl::Minutes(10);
  // Ranks run in lockstep: after the first reply the others have this long.
  absl::Duration reply_spread = absl::Seconds(5);
};

// The clock outlives the group.
std::unique_ptr<WorkerGroup> CreateWorkerGroup(WorkerGroupOptions options, WorkerDialer dialer,
                                               Clock& clock);

}  // namespace kvasir::coordinator
