// The numbers that a scheduler is made with. They hold for one formation of the worker group.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

struct SchedulerOptions {
  uint64_t group_epoch = 0;
  int64_t num_ranks = 1;
  int64_t device_blocks = 0;  // blocks that every rank's device tier holds
  int64_t disk_blocks = 0;    // blocks that every rank's disk tier holds; 0: some rank has none
  bool has_peers = false;     // every rank can ask its peers for blocks
  // Number of attended tokens that are as much work as the rest of one token's layers.
  int64_t attention_parity_tokens = 0;
  // Why the ranks measure no attention mass. Unspecified: they measure it.
  v1::MassUnmeasured mass_unmeasured = v1::MASS_UNMEASURED_UNSPECIFIED;
  int64_t vocab_size = 0;
  int64_t longest_sequence = 0;  // tokens of prompt and answer; pins leave room for them
  std::string weights_hash;
  std::string kv_form;
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;  // a multiple of 64
  int64_t max_queue_len = 0;           // requests that wait besides those that could start now
  // Prompt tokens of all waiting requests together. One request may wait whatever its length.
  int64_t max_queued_tokens = std::numeric_limits<int64_t>::max();
  bool enable_prefix_caching = true;
  // A request none of whose blocks came for this long computes the rest of them. A slow disk is
  // still faster than computing; a dead one must not hold requests up.
  absl::Duration restore_patience = absl::Seconds(10);
  // A request waits for blocks of peers for this long at most, however they trickle in.
  absl::Duration longest_peer_wait = absl::Seconds(60);
  // A disk that is set aside is tried again after the first pause, and so are peers. Each further
  // pause is twice as long, up to the longest. The request that tries the disk waits for
  // `disk_trial`.
  absl::Duration first_pause = absl::Seconds(5);
  absl::Duration longest_pause = absl::Seconds(60);
  absl::Duration disk_trial = absl::Seconds(1);

  // True when blocks are written to disk and restored.
  bool persists() const { return disk_blocks > 0 && enable_prefix_caching; }
};

}  // namespace kvasir::coordinator
