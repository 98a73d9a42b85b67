// The tensor-parallel ranks as one: they form, step and fail together. Hidden: the streams, the
// handshake, relaying the ranks' rendezvous, bounded waits, and comparing their answers. Owned by
// the engine loop and called by one thread at a time, except where a function says otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/group/worker_client.h"
#include "coordinator/time/clock.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// Values that all ranks have in common; capacities are those of the smallest rank.
struct GroupInfo {
  uint64_t epoch = 0;
  std::string weights_hash;
  std::string kv_form;
  int64_t device_blocks = 0;
  int64_t host_blocks = 0;
  int64_t disk_blocks = 0;
  bool has_peers = false;  // the ranks can ask those of other replicas for blocks
  int64_t attention_parity_tokens = 0;
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
  int64_t trained_window = 0;  // as in v1::Ready, like mass_unmeasured
  v1::MassUnmeasured mass_unmeasured = v1::MASS_UNMEASURED_UNSPECIFIED;
  std::vector<std::string> addresses;  // by rank
  std::vector<v1::Ready> ranks;        // by rank
};

// Returns the size of a block over all ranks.
inline int64_t BlockBytesOf(const GroupInfo& group) {
  int64_t bytes = 0;
  for (const v1::Ready& rank : group.ranks) bytes += static_cast<int64_t>(rank.block_bytes());
  return bytes;
}

// One rank's report on its disk tier.
struct RankTierReport {
  int64_t rank = 0;
  v1::TierReport report;
};

// An interface, because tests of the engine loop and of the service simulate a group.
class WorkerGroup {
 public:
  virtual ~WorkerGroup() = default;

  // Forms the group again under the next epoch and blocks until every rank is ready. Returns the
  // error of a rank that failed, with its name; NOT_FOUND with the names of ranks that do not
  // answer; INTERNAL when the ranks do not fit each other.
  virtual absl::StatusOr<GroupInfo> Form() = 0;
  // Sends the plan to all ranks, which carry out plans in order. Errors are those of AwaitReply.
  virtual absl::Status Send(const v1::StepPlan& plan) = 0;
  // Blocks until the ranks have answered the oldest unanswered plan, and returns their common
  // answer. After an error the group is gone: UNAVAILABLE for a rank that is dead or too slow,
  // INTERNAL for ranks that disagree. REQUIRES: a plan is unanswered.
  virtual absl::StatusOr<v1::StepReply> AwaitReply() = 0;
  // Returns the ranks' reports on their disk tiers since the last call, in order. After Form they
  // name all that the ranks store.
  virtual std::vector<RankTierReport> TakeTierReports() = 0;
  // Ends the group: the ranks drop their sequences.
  virtual void Disband() = 0;

  // Makes Form, Send and AwaitReply return CANCELLED, now and in future. Any thread.
  virtual void Interrupt() = 0;
  // Before Form. The function is called on any thread, once per formed group, when a rank is lost
  // between steps.
  virtual void SetLossCallback(std::function<void(const absl::Status&)> on_loss) = 0;
  // Before Form. Form calls the function on its thread with a text for people: what it waits for.
  virtual void SetProgressCallback(std::function<void(const std::string&)> on_progress) = 0;
  // Before Form. The function is called on any thread when there are tier reports to take.
  virtual void SetTierReportCallback(std::function<void()> on_report) = 0;
};

struct WorkerGroupOptions {
  std::vector<std::string> addresses;  // by rank
  // The group fills in epoch, rank and peers.
  v1::ShardPlan shard_plan;
  std::vector<std::vector<std::string>> peers = {};  // by rank, as ParsePeers; empty: none
  // Longest time of a rank to its first answer while the group forms.
  absl::Duration answer_timeout = absl::Seconds(30);
  // Longest silence of a rank that has answered, while the group forms: loading reports its
  // progress, but hashing a large model from a slow disk may take minutes.
  absl::Duration form_silence = absl::Minutes(10);
  // Longest time of a step, from when its answer is waited for: 1024 sequences, or a chunk after
  // millions of tokens, on a slow machine.
  absl::Duration step_timeout = absl::Minutes(10);
  // Longest time between the first reply and the others: ranks run in lockstep.
  absl::Duration reply_spread = absl::Seconds(5);
};

// The clock outlives the group.
std::unique_ptr<WorkerGroup> CreateWorkerGroup(WorkerGroupOptions options, WorkerDialer dialer,
                                               Clock& clock);

}  // namespace kvasir::coordinator
