// State that a scheduler and the planner of one step share: the blocks, the sequences, the disk,
// and the counts. Part of the scheduler; nobody else sees it. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coordinator/scheduling/block_budget.h"
#include "coordinator/scheduling/context_blocks.h"
#include "coordinator/scheduling/context_exchange.h"
#include "coordinator/scheduling/prefill_rate.h"
#include "coordinator/scheduling/restore_book.h"
#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/scheduling/scheduler_options.h"
#include "coordinator/scheduling/sequence_table.h"
#include "kvstore/index/prefix_index.h"
#include "kvstore/index/stored_index.h"

namespace kvasir::coordinator {

// Numbers of requests, unless a comment says otherwise. Those up to waiting_tokens are current
// values, the others sums since the start.
struct SchedulerStats {
  int64_t running = 0;
  int64_t waiting = 0;
  int64_t restoring = 0;       // wait for blocks from disk or peers
  int64_t read_elsewhere = 0;  // another server reads their prompts; some of their blocks may come
  bool disk_set_aside = false;
  bool peers_set_aside = false;  // they are slower than computing, or failed
  int64_t waiting_tokens = 0;    // of the waiting requests' prompts and resumed answers
  int64_t prefix_queries = 0;    // prompt tokens of admitted requests
  int64_t prefix_hits = 0;       // those of them that were found in the cache
  // Prompt tokens of admitted requests that were not found, by reason:
  int64_t missed_absent = 0;        // neither in memory nor on disk
  int64_t missed_unshared = 0;      // after the last whole block that others may share
  int64_t missed_not_restored = 0;  // on disk, which did not give them
  int64_t missed_disabled = 0;      // the cache is switched off
  int64_t preempted_swap = 0;       // preemptions with a disk tier to write to
  int64_t preempted_recompute = 0;
  int64_t preempted_restore = 0;  // after restored blocks that follow on a computed one
  int64_t preempted_loss = 0;     // with the worker group
  int64_t preempted_damage = 0;   // to be computed again, because KV was damaged
  int64_t resumed_disk = 0;       // admitted again, with blocks from disk
  int64_t resumed_peer = 0;       // with blocks from a peer and none from disk
  int64_t resumed_host = 0;       // with blocks from memory only
  int64_t resumed_recompute = 0;
  int64_t pinned_host_blocks = 0;  // now, by contexts
  int64_t pinned_disk_blocks = 0;  // likewise
  int64_t plans_ahead = 0;         // plans made while another one was unanswered
  int64_t rows_in_vain = 0;        // rows of sequences that had ended when they were answered
  kvstore::PrefixIndexStats index;
  kvstore::StoredIndexStats stored;
};

// A waiting request that did not fit, and the number of unreserved blocks at that time. It is tried
// again when there are more.
struct LastMisfit {
  SequenceId id;
  int64_t unreserved_blocks = 0;
};

struct SchedulerState {
  SchedulerState(const SchedulerOptions& scheduler_options,
                 std::unique_ptr<kvstore::PrefixIndex> index);

  // Tells how far the prompt is read. A client that has seen tokens, or more of its prompt
  // processed before it was preempted, is told nothing.
  void ReportProgress(Sequence& sequence, std::vector<Event>& events) const;
  ProgressEvent Progress(const Sequence& sequence) const;
  // Adds to the counts how much of the sequence's prompt was cached. Called once, when the ranks
  // have carried out its start: counters of metrics cannot be taken back.
  void CountPrefix(const Sequence& sequence);

  const SchedulerOptions options;
  const int64_t device_share;  // number of unsealed blocks that may exist at a time
  const int64_t max_running;
  // Outlives every handle and reservation, so it is declared before their holders.
  BlockBudget blocks;
  PrefillRate prefill_rate;
  RestoreBook restores;
  SequenceTable sequences;
  ContextBlocks contexts;
  ContextExchange exchange;
  int64_t prompts_read = 0;  // since the start
  LastMisfit last_misfit;
  SchedulerStats counters;  // the sums of it
};

}  // namespace kvasir::coordinator
