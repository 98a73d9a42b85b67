#include "coordinator/scheduling/restore_book.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kvstore::BlockId;
using kvstore::PrefixHash;
using kvstore::StoredLink;

// A sequence asks peers for no fewer blocks.
constexpr int64_t kLeastAtPeers = 4;
// Blocks that peers are asked for at first, the factor by which further questions grow, and the
// most blocks of one: a sequence takes room for all of them, though perhaps no peer has any.
constexpr int64_t kFirstAtPeers = 64;
constexpr int64_t kMoreAtPeers = 4;
constexpr int64_t kMostAtPeers = 1024;

// After another server has read a prompt, the time in which its last blocks are sealed, and the
// pause between questions for them.
constexpr absl::Duration kSealPatience = absl::Milliseconds(100);
constexpr absl::Duration kSealPause = absl::Milliseconds(5);

absl::StatusOr<PrefixHash> ParseHash(int64_t rank, const std::string& bytes) {
  PrefixHash hash;
  if (bytes.size() != hash.size()) {
    return absl::InternalError(absl::StrCat("rank ", rank,
                                            " reports a stored block with a hash of ", bytes.size(),
                                            " bytes instead of ", hash.size()));
  }
  std::copy(bytes.begin(), bytes.end(), hash.begin());
  return hash;
}

bool IsNotFound(const v1::RestoredBlock& restored) {
  return restored.error_code() == static_cast<int32_t>(absl::StatusCode::kNotFound);
}

}  // namespace

absl::Status RestoreBook::OnReport(int64_t rank, const v1::TierReport& report, TimePoint now) {
  for (const v1::StoredBlock& block : report.stored()) {
    KVASIR_ASSIGN_OR_RETURN(const PrefixHash hash, ParseHash(rank, block.prefix_hash()));
    if (block.tokens_size() != kBlockTokens) {
      return absl::InternalError(absl::StrCat("rank ", rank, " reports a stored block of ",
                                              block.tokens_size(), " tokens"));
    }
    stored_.Stored(rank, hash, std::vector<int32_t>(block.tokens().begin(), block.tokens().end()));
  }
  for (const std::string& bytes : report.forgotten()) {
    KVASIR_ASSIGN_OR_RETURN(const PrefixHash hash, ParseHash(rank, bytes));
    stored_.Forgotten(rank, hash);
  }
  for (const v1::RestoredBlock& restored : report.restored()) OnRestored(restored, now);
  return absl::OkStatus();
}

RestoreBook::Restorable RestoreBook::Match(const Sequence& sequence,
                                           const kvstore::PrefixMatch& match, TimePoint now) {
  Restorable found;
  if (!options_.enable_prefix_caching || sequence.restore_tried) return found;
  const auto cached = static_cast<int64_t>(match.blocks.size());
  const PrefixHash& parent = match.hashes.empty() ? sequence.scope : match.hashes.back();
  if (now >= disk_aside_until_) {
    found.links = stored_.Match(
        parent, sequence.matchable().subspan(static_cast<size_t>(cached * kBlockTokens)), cached,
        sequence.decode_part);
    found.stored = std::ssize(found.links);
  }
  if (!options_.has_peers || now < peers_aside_until_) return found;
  const int64_t begin = cached + found.stored;
  const int64_t end = std::min(sequence.blocks_at_peers(), begin + kFirstAtPeers);
  if (end - begin < kLeastAtPeers) return found;
  AddAtPeers(sequence, found.links.empty() ? parent : found.links.back().hash, begin, end, found);
  return found;
}

RestoreBook::Restorable RestoreBook::MatchOn(Sequence& sequence, TimePoint now) {
  Restorable found;
  Entry& entry = EntryOf(sequence);
  const bool asks_again = std::exchange(entry.asks_again, TimePoint()) != TimePoint();
  const bool has_more = std::exchange(sequence.is_read_further, false) || asks_again;
  if (has_more && now >= peers_aside_until_ && sequence.later_blocks.empty()) {
    entry.next_at_peers = kMostAtPeers;
    // It did not wait for peers while there was nothing to ask them for.
    entry.peers_until = After(now, options_.longest_peer_wait);
  }
  const int64_t begin = sequence.num_blocks();
  AddAtPeers(sequence, sequence.chain(), begin,
             std::min(sequence.blocks_at_peers(), begin + entry.next_at_peers), found);
  return found;
}

void RestoreBook::AddAtPeers(const Sequence& sequence, PrefixHash parent, int64_t begin,
                             int64_t end, Restorable& found) {
  for (int64_t i = begin; i < end; ++i) {
    parent = kvstore::HashBlock(parent, sequence.block_tokens(i), sequence.decode_part.KeyOf(i));
    found.links.push_back({.hash = parent});
  }
}

void RestoreBook::Begin(Sequence& sequence, const Restorable& restorable, TimePoint now) {
  const bool on_trial = is_disk_set_aside() && restorable.stored > 0;
  sequence.restore_tried = true;
  entries_.push_back(
      {.sequence = &sequence,
       .begin = sequence.num_blocks(),
       .deadline = After(now, on_trial ? options_.disk_trial : options_.restore_patience),
       .peers_until = After(now, options_.longest_peer_wait)});
  if (on_trial) disk_aside_until_ = After(now, disk_pause_);  // one sequence is enough
  Await(entries_.back(), restorable, now);
}

void RestoreBook::Continue(Sequence& sequence, const Restorable& restorable, TimePoint now) {
  Entry& entry = EntryOf(sequence);
  entry.begin = sequence.num_blocks();
  Await(entry, restorable, now);
  entry.deadline = std::min(After(now, options_.restore_patience), entry.peers_until);
}

void RestoreBook::ExpectLastBlocks(const Sequence& sequence, TimePoint now) {
  EntryOf(sequence).sealed_by = After(now, kSealPatience);
}

void RestoreBook::Await(Entry& entry, const Restorable& restorable, TimePoint now) {
  Sequence& sequence = *entry.sequence;
  const int64_t begin = sequence.num_blocks();
  entry.asked = std::ssize(restorable.links);
  entry.asked_at = now;
  for (int64_t i = 0; i < std::ssize(restorable.links); ++i) {
    const auto& [hash, held] = restorable.links[static_cast<size_t>(i)];
    if (!held) continue;
    const int64_t index = begin + i;
    const bool follows = index == sequence.num_blocks();
    const BlockId id = follows ? sequence.TakeBlock() : sequence.TakeLaterBlock(index, hash);
    if (follows) sequence.hashes.push_back(hash);
    awaited_[id] = {.sequence = &sequence,
                    .index = index,
                    .hash = hash,
                    .ranks_left = options_.num_ranks,
                    .is_stored = i < restorable.stored};
    awaited_hashes_.insert(hash);
    ++entry.pending;
  }
  const int64_t at_peers = std::ssize(restorable.links) - restorable.stored;
  const bool has_gap = !sequence.later_blocks.empty();
  entry.next_at_peers = has_gap ? 0 : std::min(kMoreAtPeers * at_peers, kMostAtPeers);
}

// A block that nobody waits for any more was dropped before its report came.
void RestoreBook::OnRestored(const v1::RestoredBlock& restored, TimePoint now) {
  const auto it = awaited_.find(BlockId(static_cast<int64_t>(restored.block_id())));
  if (it == awaited_.end()) return;
  AwaitedBlock& block = it->second;
  Entry& entry = EntryOf(*block.sequence);
  if (restored.error_code() != 0) {
    if (block.is_stored) {
      awaited_hashes_.erase(block.hash);
      block.sequence->LoseBlock(block.index);
      entry.next_at_peers = 0;
      --entry.pending;
      const std::optional<int64_t> rest =
          block.sequence->BlockAfterGap(kvstore::StoredIndex::kMostGaps + 1);
      awaited_.erase(it);
      if (rest.has_value()) KeepOnly(entry, *rest);
    } else {
      // It cost a wait and brought nothing: that is slower than computing. A peer that has not got
      // the block says so at once.
      if (!IsNotFound(restored)) SetPeersAside(now);
      if (IsNotFound(restored) && now < entry.sealed_by) entry.asks_again = After(now, kSealPause);
      KeepOnly(entry, block.index);
    }
  } else if (--block.ranks_left == 0) {
    if (block.is_stored) {
      disk_pause_ = absl::ZeroDuration();
      disk_aside_until_ = TimePoint();
      disk_answered_at_ = now;
    }
    const bool at_peers = !block.is_stored;
    awaited_.erase(it);
    entry.deadline = After(now, options_.restore_patience);
    if (at_peers) entry.deadline = std::min(entry.deadline, entry.peers_until);
    if (--entry.pending == 0 && at_peers) JudgePeers(entry, now);
  }
  if (entry.pending == 0) Publish(entry);
}

// A question waits for the step that carries it, and its answer for the one that runs meanwhile. A
// few blocks may wait for that longer than they would take to compute, and tell nothing. Nor do
// those of a prompt that another server reads: that keeps it from the steps of streams, at any
// speed.
void RestoreBook::JudgePeers(Entry& entry, TimePoint now) {
  if (entry.sequence->spec.is_read_elsewhere) return;
  if (entry.next_at_peers == 0 || entry.asked < kFirstAtPeers || !prefill_rate_.is_known()) return;
  const double tokens = static_cast<double>(entry.asked * kBlockTokens);
  if (Between(entry.asked_at, now) - 2 * last_step_ <= prefill_rate_.TimeFor(tokens)) {
    peers_pause_ = absl::ZeroDuration();
    return;
  }
  SetPeersAside(now);
  entry.next_at_peers = 0;
}

void RestoreBook::SetPeersAside(TimePoint now) {
  if (now < peers_aside_until_) return;  // other sequences had asked before
  peers_pause_ = std::clamp(2 * peers_pause_, options_.first_pause, options_.longest_pause);
  peers_aside_until_ = After(now, peers_pause_);
}

void RestoreBook::GiveUpLate(TimePoint now) {
  bool late = false;
  for (Entry& entry : entries_) {
    if (entry.pending == 0 || now < entry.deadline) continue;
    if (AwaitsStored(entry)) {
      late = true;
    } else {
      SetPeersAside(now);
    }
    ComputeRest(entry);
  }
  // A slow disk that serves other sequences is still worth waiting for.
  if (late && now >= After(disk_answered_at_, options_.restore_patience)) SetDiskAside(now);
}

bool RestoreBook::AwaitsStored(const Entry& entry) const {
  return std::any_of(awaited_.begin(), awaited_.end(), [&](const auto& awaited) {
    return awaited.second.sequence == entry.sequence && awaited.second.is_stored;
  });
}

void RestoreBook::SetDiskAside(TimePoint now) {
  disk_pause_ = std::clamp(2 * disk_pause_, options_.first_pause, options_.longest_pause);
  disk_aside_until_ = After(now, disk_pause_);
  for (Entry& entry : entries_) {
    if (entry.pending > 0) ComputeRest(entry);
  }
}

// Lets the sequence compute everything from its first awaited block on.
void RestoreBook::ComputeRest(Entry& entry) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const auto& [id, block] : awaited_) {
    if (block.sequence == entry.sequence) first = std::min(first, block.index);
  }
  KeepOnly(entry, first);
  Publish(entry);
}

// The sequence goes on with its first `num_blocks` blocks and computes the others.
void RestoreBook::KeepOnly(Entry& entry, int64_t num_blocks) {
  Sequence& sequence = *entry.sequence;
  entry.next_at_peers = 0;
  const auto await_no_more = [&](BlockId id, const PrefixHash& hash) {
    entry.pending -= static_cast<int64_t>(awaited_.erase(id));
    awaited_hashes_.erase(hash);
  };
  for (size_t i = static_cast<size_t>(num_blocks); i < sequence.blocks.size(); ++i) {
    await_no_more(sequence.blocks[i].id(), sequence.hashes[i]);
  }
  for (const Sequence::LaterBlock& later : sequence.later_blocks) {
    if (later.index >= num_blocks) await_no_more(later.block.id(), later.hash);
  }
  if (num_blocks < sequence.num_blocks()) {
    sequence.hashes.resize(static_cast<size_t>(num_blocks));
    sequence.GiveBackBlocks(num_blocks);
  }
  sequence.GiveBackLaterBlocks(num_blocks);
}

// From here on others find the blocks too. A block that is refused stays this sequence's own, like
// one that it computed at the same time as another sequence.
void RestoreBook::Publish(const Entry& entry) {
  const Sequence& sequence = *entry.sequence;
  for (int64_t i = entry.begin; i < sequence.num_blocks(); ++i) {
    awaited_hashes_.erase(sequence.hashes[static_cast<size_t>(i)]);
    sequence.Publish(i, index_);
  }
  for (const Sequence::LaterBlock& later : sequence.later_blocks) awaited_hashes_.erase(later.hash);
}

void RestoreBook::Forget(const Sequence& sequence) {
  const Entry entry = EntryOf(sequence);
  std::erase_if(entries_, [&](const Entry& other) { return other.sequence == &sequence; });
  for (size_t i = static_cast<size_t>(entry.begin); i < sequence.blocks.size(); ++i) {
    awaited_.erase(sequence.blocks[i].id());
    awaited_hashes_.erase(sequence.hashes[i]);
  }
  for (const Sequence::LaterBlock& later : sequence.later_blocks) {
    awaited_.erase(later.block.id());
    awaited_hashes_.erase(later.hash);
  }
}

std::optional<TimePoint> RestoreBook::NextDeadline() const {
  std::optional<TimePoint> next;
  for (const Entry& entry : entries_) {
    const TimePoint due = entry.pending == 0 ? entry.asks_again : entry.deadline;
    if (due != TimePoint()) next = std::min(next.value_or(due), due);
  }
  return next;
}

std::vector<Sequence*> RestoreBook::Sequences() const {
  std::vector<Sequence*> sequences;
  for (const Entry& entry : entries_) sequences.push_back(entry.sequence);
  return sequences;
}

std::vector<Sequence*> RestoreBook::Ready(TimePoint now) const {
  std::vector<Sequence*> ready;
  for (const Entry& entry : entries_) {
    if (entry.pending == 0 && now >= entry.asks_again) ready.push_back(entry.sequence);
  }
  return ready;
}

RestoreBook::Entry& RestoreBook::EntryOf(const Sequence& sequence) {
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [&](const Entry& entry) { return entry.sequence == &sequence; });
  KVASIR_CHECK(it != entries_.end());
  return *it;
}

absl::Status RestoreBook::CheckIntegrity() const {
  size_t pending = 0;
  for (const Entry& entry : entries_) pending += static_cast<size_t>(entry.pending);
  if (pending == awaited_.size() && (pending == 0) == awaited_hashes_.empty()) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("restores: ", entries_.size(), " sequences wait for ",
                                          pending, " blocks, ", awaited_.size(), " blocks and ",
                                          awaited_hashes_.size(), " hashes are awaited"));
}

}  // namespace kvasir::coordinator
