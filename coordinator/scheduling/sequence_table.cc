#include "coordinator/scheduling/sequence_table.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using State = Sequence::State;

bool IsOlder(const Sequence* a, const Sequence* b) { return a->spec.id < b->spec.id; }

}  // namespace

SequenceTable::SequenceTable(int64_t num_slots, RestoreBook& restores)
    : num_slots_(num_slots), restores_(restores) {
  for (int64_t slot = num_slots - 1; slot >= 0; --slot) idle_slots_.push_back(slot);
}

Sequence* SequenceTable::Find(SequenceId id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second.get();
}

std::vector<Sequence*> SequenceTable::OldestFirst() const {
  std::vector<Sequence*> sequences;
  for (const auto& [id, sequence] : sequences_) sequences.push_back(sequence.get());
  std::sort(sequences.begin(), sequences.end(), IsOlder);
  return sequences;
}

int64_t SequenceTable::waiting_tokens() const {
  int64_t tokens = 0;
  for (const Sequence* sequence : waiting_) {
    tokens += sequence->prompt_tokens + sequence->resumed_tokens;
  }
  return tokens;
}

int64_t SequenceTable::unsealed_blocks() const {
  int64_t blocks = 0;
  for (const Sequence* sequence : running_) blocks += sequence->unsealed_blocks();
  return blocks;
}

void SequenceTable::Add(std::unique_ptr<Sequence> sequence) {
  const bool is_elsewhere = sequence->state == State::kElsewhere;
  KVASIR_CHECK((is_elsewhere || sequence->state == State::kWaiting) &&
               !sequences_.contains(sequence->spec.id));
  if (is_elsewhere) {
    elsewhere_.push_back(sequence.get());
  } else {
    waiting_.push_back(sequence.get());
  }
  sequences_.emplace(sequence->spec.id, std::move(sequence));
}

void SequenceTable::EndReadElsewhere(Sequence& sequence, TimePoint now) {
  sequence.read_elsewhere.reset();
  if (sequence.state == State::kRestoring) sequence.restores_since = now;
  if (sequence.state != State::kElsewhere) return;
  sequence.is_read_further = false;
  Leave(sequence);
  waiting_.push_back(&sequence);
  sequence.state = State::kWaiting;
}

void SequenceTable::Restore(Sequence& sequence, const RestoreBook::Restorable& restorable,
                            TimePoint now) {
  KVASIR_CHECK(sequence.state == State::kWaiting || sequence.state == State::kElsewhere);
  Leave(sequence);
  restores_.Begin(sequence, restorable, now);
  sequence.is_planned = true;
  sequence.state = State::kRestoring;
  if (!sequence.admitted_at.has_value()) sequence.restores_since = now;
}

void SequenceTable::Run(Sequence& sequence) {
  KVASIR_CHECK(sequence.state == State::kWaiting || sequence.state == State::kRestoring);
  Leave(sequence);
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, IsOlder),
                  &sequence);
  sequence.slot = idle_slots_.back();
  idle_slots_.pop_back();
  sequence.is_planned = true;
  sequence.state = State::kRunning;
}

void SequenceTable::BackToQueue(Sequence& sequence) {
  KVASIR_CHECK(sequence.state == State::kRestoring || sequence.state == State::kRunning);
  Leave(sequence);
  FreeSlot(sequence);
  sequence.reservation.Release();
  sequence.blocks.clear();
  sequence.hashes.clear();
  sequence.later_blocks.clear();
  sequence.computed = 0;
  sequence.is_damaged = false;
  sequence.is_read_further = false;
  if (sequence.preemptions == 0) sequence.restores_since.reset();
  if (sequence.read_elsewhere.has_value()) {
    elsewhere_.push_back(&sequence);
    sequence.state = State::kElsewhere;
    return;
  }
  waiting_.push_front(&sequence);
  sequence.state = State::kWaiting;
}

void SequenceTable::Preempt(Sequence& sequence) {
  if (sequence.state == State::kRunning) {
    ++sequence.preemptions;
    sequence.given_tokens = sequence.length();
  }
  BackToQueue(sequence);
  sequence.restore_tried = false;
}

void SequenceTable::End(Sequence& sequence, Blocks blocks) {
  Leave(sequence);
  sequence.reservation.Release();
  sequence.state = State::kEnded;
  std::unique_ptr<Sequence> owned = std::move(sequences_.extract(sequence.spec.id).mapped());
  if (owned->slot >= 0) ended_.push_back({.sequence = std::move(owned), .blocks = blocks});
}

void SequenceTable::Leave(Sequence& sequence) {
  switch (sequence.state) {
    case State::kElsewhere:
      std::erase(elsewhere_, &sequence);
      return;
    case State::kWaiting:
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
      return;
    case State::kRestoring:
      restores_.Forget(sequence);
      return;
    case State::kRunning:
      running_.erase(std::find(running_.begin(), running_.end(), &sequence));
      return;
    case State::kEnded:
      KVASIR_CHECK(false);
  }
}

void SequenceTable::FreeSlot(Sequence& sequence) {
  if (sequence.slot >= 0) idle_slots_.push_back(std::exchange(sequence.slot, -1));
}

void SequenceTable::UndoStartOfEnded(SequenceId id) {
  for (Ended& ended : ended_) {
    if (ended.sequence->spec.id == id) FreeSlot(*ended.sequence);
  }
}

void SequenceTable::FreeEnded() {
  for (Ended& ended : ended_) FreeSlot(*ended.sequence);
  ended_.clear();
}

std::vector<std::unique_ptr<Sequence>> SequenceTable::TakeAll() {
  std::vector<std::unique_ptr<Sequence>> all;
  for (Sequence* sequence : OldestFirst()) {
    KVASIR_CHECK(sequence->state == State::kWaiting);
    all.push_back(std::move(sequences_.at(sequence->spec.id)));
  }
  sequences_.clear();
  waiting_.clear();
  return all;
}

absl::Status SequenceTable::CheckIntegrity() const {
  absl::flat_hash_set<int64_t> slots(idle_slots_.begin(), idle_slots_.end());
  size_t num_slots = idle_slots_.size();
  bool is_slot_due = true;  // a slot is held by those that run or ran, and by no other
  for (const auto& [id, sequence] : sequences_) {
    is_slot_due &= (sequence->slot >= 0) == (sequence->state == State::kRunning);
    if (sequence->slot < 0) continue;
    slots.insert(sequence->slot);
    ++num_slots;
  }
  for (const Ended& ended : ended_) {
    is_slot_due &= ended.sequence->state == State::kEnded;
    if (ended.sequence->slot < 0) continue;
    slots.insert(ended.sequence->slot);
    ++num_slots;
  }
  const auto all_in = [](const auto& sequences, State state) {
    return std::all_of(sequences.begin(), sequences.end(),
                       [&](const Sequence* sequence) { return sequence->state == state; });
  };
  const std::vector<Sequence*> restoring = restores_.Sequences();
  const bool states_add_up =
      sequences_.size() ==
          running_.size() + waiting_.size() + elsewhere_.size() + restoring.size() &&
      all_in(running_, State::kRunning) && all_in(waiting_, State::kWaiting) &&
      all_in(elsewhere_, State::kElsewhere) && all_in(restoring, State::kRestoring);
  if (states_add_up && is_slot_due && slots.size() == num_slots &&
      num_slots == static_cast<size_t>(num_slots_)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "sequences: ", sequences_.size(), ", of which ", running_.size(), " run, ", waiting_.size(),
      " wait, ", elsewhere_.size(), " are read elsewhere, ", restoring.size(), " restore",
      states_add_up ? "" : " (in other states)", ", and ", ended_.size(), " that ended; ",
      num_slots, " slots (", slots.size(), " different) of ", num_slots_,
      is_slot_due ? "" : ", one of them held by a sequence that does not run"));
}

}  // namespace kvasir::coordinator
