// Blocks that ranks have beside those of the prefix index, on disk or in memory from a group
// before, as the scheduler sees them: which blocks are stored, which are on their way back and for
// whom, and whether the disk is worth asking. And blocks that peers of the ranks may have.
//
// Where the prefix index ends, the chain of a prompt goes on among the blocks that every rank has
// stored. Those are restored first: the sequence holds its blocks and waits, others run on. A
// block that some rank has not, or cannot read, is computed; those after it stay with the sequence
// until then, unless there are so many gaps that their starts cost more. A block that does not come
// in time is computed with all blocks after it. A sequence asks for its blocks once. A disk that
// brings nothing for a time is set aside at once: all sequences that wait for it compute their
// blocks, and only from time to time one sequence tries the disk again, for a short while.
//
// Where the stored blocks end, too, the rest of the chain is asked for at peers, if there are any:
// nobody here knows what they hold. The ranks answer for each block; from the first that some rank
// does not get on the prompt is computed. The first questions are short, because ranks take room
// for what they ask for: only a sequence that got all of it asks on.
// Where blocks come slower than they would be computed, or late, or a peer fails to give one, peers
// are set aside, and asked again after a pause.
//
// A prompt that another server reads is asked for while it is read, as far as it is sealed there: a
// question each time that it was read further, for all that is new. What is absent is asked for
// with the next question. Once the prompt has been read its last blocks are sealed in a moment:
// those that are absent are asked for again for a while.
//
// Called by the scheduler. Thread-compatible. It outlives the sequences that it names.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"

#include "coordinator/scheduling/prefill_rate.h"
#include "coordinator/scheduling/scheduler_options.h"
#include "coordinator/scheduling/sequence.h"
#include "coordinator/time/clock.h"
#include "kvstore/index/prefix_index.h"
#include "kvstore/index/stored_index.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

class RestoreBook {
 public:
  // The references outlive the book.
  RestoreBook(const SchedulerOptions& options, kvstore::PrefixIndex& index,
              const PrefillRate& prefill_rate)
      : options_(options), index_(index), prefill_rate_(prefill_rate), stored_(options.num_ranks) {}

  // Takes what a rank says of its stored blocks. INTERNAL when the report makes no sense.
  absl::Status OnReport(int64_t rank, const v1::TierReport& report, TimePoint now);

  bool HeldByAll(const kvstore::PrefixHash& hash) const { return stored_.HeldByAll(hash); }
  // The chain that may be restored after `match`, up to the last of its blocks that is stored or
  // that peers may have. Empty when the sequence has asked before.
  struct Restorable {
    std::vector<kvstore::StoredLink> links;  // one that is not held is computed
    int64_t stored =
        0;  // number of the first ones up to the last stored one; then come those of peers
  };
  Restorable Match(const Sequence& sequence, const kvstore::PrefixMatch& match, TimePoint now);
  // The blocks that peers may have after those that they gave. None when they did not give all, and
  // the prompt was not read further elsewhere since. REQUIRES: the sequence waits for no block.
  Restorable MatchOn(Sequence& sequence, TimePoint now);
  // Some sequence restores this block.
  bool IsAwaited(const kvstore::PrefixHash& hash) const { return awaited_hashes_.contains(hash); }

  // Takes blocks for those of `restorable` that are held, and awaits them. The chain follows on the
  // blocks that the sequence has. Continue is for a sequence that is in the book.
  void Begin(Sequence& sequence, const Restorable& restorable, TimePoint now);
  void Continue(Sequence& sequence, const Restorable& restorable, TimePoint now);
  // Another server has read the sequence's prompt wholly, and seals its last blocks soon.
  void ExpectLastBlocks(const Sequence& sequence, TimePoint now);
  // The ranks have answered a step, which took this long.
  void OnStep(absl::Duration time) { last_step_ = time; }
  // Forgets the sequence, which stops restoring for whatever reason.
  void Forget(const Sequence& sequence);
  // Lets sequences whose blocks are late compute them.
  void GiveUpLate(TimePoint now);
  // The earliest time at which GiveUpLate has something to do, or a sequence becomes ready.
  std::optional<TimePoint> NextDeadline() const;

  // Number of sequences in the book.
  int64_t num_sequences() const { return static_cast<int64_t>(entries_.size()); }
  // All of them, in the order in which they began.
  std::vector<Sequence*> Sequences() const;
  // Those that wait for no block any more, in the same order.
  std::vector<Sequence*> Ready(TimePoint now) const;

  bool is_disk_set_aside() const { return disk_pause_ > absl::ZeroDuration(); }
  bool are_peers_set_aside() const { return peers_pause_ > absl::ZeroDuration(); }
  kvstore::StoredIndexStats stored_stats() const { return stored_.stats(); }
  // The awaited blocks add up. For tests.
  absl::Status CheckIntegrity() const;

 private:
  struct Entry {
    Sequence* sequence = nullptr;
    int64_t begin = 0;      // blocks of the sequence from here on are, or were, awaited
    int64_t pending = 0;    // number of blocks that are still awaited
    TimePoint deadline;     // for the next of them
    TimePoint peers_until;  // no block of a peer is awaited for longer
    // Number of blocks that peers are asked for next, if they give all that they are asked for now.
    int64_t next_at_peers = 0;
    int64_t asked = 0;  // number of blocks that it asked for last
    TimePoint asked_at = {};
    TimePoint sealed_by = {};   // until then a block that is absent may be sealed yet
    TimePoint asks_again = {};  // set while it waits to ask for such blocks again
  };
  struct AwaitedBlock {
    Sequence* sequence = nullptr;
    int64_t index = 0;  // of the block in the sequence
    kvstore::PrefixHash hash;
    int64_t ranks_left = 0;  // number of ranks that have not restored it yet
    bool is_stored = false;  // on all ranks' disks, not perhaps at peers
  };

  Entry& EntryOf(const Sequence& sequence);
  // Appends the sequence's blocks [begin, end), which follow on `parent`.
  static void AddAtPeers(const Sequence& sequence, kvstore::PrefixHash parent, int64_t begin,
                         int64_t end, Restorable& found);
  void Await(Entry& entry, const Restorable& restorable, TimePoint now);
  // Everything that the sequence asked for last has come: compares the wait with computing it.
  void JudgePeers(Entry& entry, TimePoint now);
  void OnRestored(const v1::RestoredBlock& restored, TimePoint now);
  // Whether some of the blocks that it waits for are stored, not perhaps at peers.
  bool AwaitsStored(const Entry& entry) const;
  void SetDiskAside(TimePoint now);
  void SetPeersAside(TimePoint now);
  void ComputeRest(Entry& entry);
  void KeepOnly(Entry& entry, int64_t num_blocks);
  void Publish(const Entry& entry);

  const SchedulerOptions& options_;
  kvstore::PrefixIndex& index_;
  const PrefillRate& prefill_rate_;
  kvstore::StoredIndex stored_;

  std::vector<Entry> entries_;
  absl::flat_hash_map<kvstore::BlockId, AwaitedBlock> awaited_;
  absl::flat_hash_set<kvstore::PrefixHash> awaited_hashes_;  // asked for and not yet published

  // Zero while the disk answers. Else the length of the present pause, which ends at
  // disk_aside_until_.
  absl::Duration disk_pause_ = absl::ZeroDuration();
  TimePoint disk_aside_until_;
  TimePoint disk_answered_at_;
  // The same for peers that are slower than computing, or fail.
  absl::Duration peers_pause_ = absl::ZeroDuration();
  TimePoint peers_aside_until_;
  absl::Duration last_step_ = absl::ZeroDuration();
};

}  // namespace kvasir::coordinator
