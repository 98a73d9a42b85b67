// All sequences of a scheduler and the states they are in. A sequence is in one state at a time,
// and only the functions below change it:
//
//                 Restore              Run
//     kWaiting ----------> kRestoring ------> kRunning
//        |  ^--------------------+---------------|  |     BackToQueue: from both, to the head
//        |  `----------------- Run --------------^  |
//        `------------------> kEnded <--------------'     End: from every state
//
//     kElsewhere --EndReadElsewhere--> kWaiting           to the end of the queue
//        |  ^--BackToQueue--+                             while it is read elsewhere
//        `----- Restore -----> kRestoring
//
// A waiting sequence holds nothing: no blocks, no reservation, no slot. Nor does one whose prompt
// another server reads, and it is not in the queue. A restoring one holds its blocks and a
// reservation for the rest of what it reads. A running one has a slot as well. One that ended while
// it ran keeps its slot and its blocks until FreeEnded; one that ended before is destroyed at once.
//
// When the group is lost, all of them are preempted and leave the table by TakeAll.
//
// Called by the scheduler. Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

#include "coordinator/scheduling/restore_book.h"
#include "coordinator/scheduling/sequence.h"

namespace kvasir::coordinator {

class SequenceTable {
 public:
  // Whether others may find the blocks of a sequence that ended.
  enum class Blocks { kKeep, kDiscard };
  struct Ended {
    std::unique_ptr<Sequence> sequence;
    Blocks blocks = Blocks::kDiscard;
  };

  // `restores` outlives the table.
  SequenceTable(int64_t num_slots, RestoreBook& restores);

  // --- reading ---
  // Null when there is no such sequence or it has ended.
  Sequence* Find(SequenceId id) const;
  // By age, so by id.
  std::vector<Sequence*> OldestFirst() const;
  const std::deque<Sequence*>& waiting() const { return waiting_; }
  const std::vector<Sequence*>& elsewhere() const { return elsewhere_; }  // none restores
  const std::vector<Sequence*>& running() const { return running_; }      // by age
  const std::vector<Ended>& ended() const { return ended_; }              // that ran
  // Number of sequences that hold blocks: the running and the restoring ones.
  int64_t num_holding() const {
    return static_cast<int64_t>(running_.size()) + restores_.num_sequences();
  }
  int64_t waiting_tokens() const;   // of prompts and of resumed answers
  int64_t unsealed_blocks() const;  // of running sequences

  // --- transitions ---
  // Takes a new sequence: at the end of the queue, or as one that is read elsewhere.
  void Add(std::unique_ptr<Sequence> sequence);
  // Nobody else reads its prompt any more. From now on it waits for blocks alone, if it does.
  void EndReadElsewhere(Sequence& sequence, TimePoint now);
  // Waits for the blocks of `restorable` that are held, which follow on those that the sequence
  // has.
  void Restore(Sequence& sequence, const RestoreBook::Restorable& restorable, TimePoint now);
  // Gives a slot to a sequence that holds its blocks. REQUIRES: a slot is idle.
  void Run(Sequence& sequence);
  // Puts a sequence that holds blocks at the head of the queue, or among those that are read
  // elsewhere. It gives up all that it holds.
  void BackToQueue(Sequence& sequence);
  // The same for a sequence that gives way: when it runs again it reads its answer so far as well.
  void Preempt(Sequence& sequence);
  void End(Sequence& sequence, Blocks blocks);

  // The sequence ended, and then the ranks refused the plan that started it: its slot is idle.
  void UndoStartOfEnded(SequenceId id);
  // Frees the slots and the blocks of the sequences that ended.
  void FreeEnded();

  // Takes all sequences out, the oldest first. REQUIRES: all of them wait.
  std::vector<std::unique_ptr<Sequence>> TakeAll();

  // States and slots add up. For tests.
  absl::Status CheckIntegrity() const;

 private:
  // The one way out of every state. The caller sets the next state.
  void Leave(Sequence& sequence);
  void FreeSlot(Sequence& sequence);

  const int64_t num_slots_;
  RestoreBook& restores_;  // knows the restoring ones
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;  // that have not ended
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> elsewhere_;
  std::vector<Sequence*> running_;
  std::vector<Ended> ended_;
  std::vector<int64_t> idle_slots_;
};

}  // namespace kvasir::coordinator
