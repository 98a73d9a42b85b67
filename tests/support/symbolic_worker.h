// A tensor-parallel rank without tensors: carries out plans on paper, refuses every plan that a
// real worker could not carry out, and answers tokens that are a function of the sequence's own
// tokens. KV is a fingerprint per position: of all tokens before it and the attention each was read
// with. So a cached block that is not exactly what computing it afresh would give is found out, and
// ExpectedTokens says what a request must be answered whatever shared its batch or its prefix. Its
// disk keeps fingerprints by prefix hash, and answers when the test says so, or fails.
// Thread-compatible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "coordinator/policy/policy.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/block.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::testing {

struct SymbolicWorkerOptions {
  int64_t device_blocks = 64;
  int64_t host_blocks = 256;
  int64_t max_num_seqs = 8;
  int64_t max_num_batched_tokens = 512;
  int64_t vocab_size = 50;
  int64_t disk_blocks = 0;
  bool has_peers = false;
};

class SymbolicWorker {
 public:
  explicit SymbolicWorker(const SymbolicWorkerOptions& options) : options_(options) {}

  // FAILED_PRECONDITION with what is wrong with the plan.
  absl::StatusOr<v1::StepReply> Execute(const v1::StepPlan& plan);

  // What became of the disk since the last call. kDone: all that was asked; kSome: of writes and
  // reads in any order each with a chance of 1/2, and reads fail with a chance of 1/8.
  enum class Disk { kDone, kSome };
  v1::TierReport TakeTierReport(Disk how, uint64_t random = 0);
  // The process starts anew on the disk of another; what it reports when it joins.
  v1::TierReport TakeOverDisk(const SymbolicWorker& other);
  // From now on a peer has what another rank has stored.
  void AskPeer(const SymbolicWorker& other) { at_peer_ = other.stored_; }
  // The next `n` reads of the disk fail, after `sound` that do not.
  void FailReads(int64_t n, int64_t sound = 0) {
    failing_reads_ = n;
    sound_reads_ = sound;
  }
  int64_t num_stored() const { return static_cast<int64_t>(stored_.size()); }
  int64_t reads() const { return reads_done_; }

  // The rank forgets a kept block that no running sequence uses; false when there is none.
  bool LoseOneBlock(uint64_t random);
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_sequences() const { return static_cast<int64_t>(slots_.size()); }

  // What a request is answered: at most max_tokens tokens, a stop token included.
  static std::vector<int32_t> ExpectedTokens(std::vector<int32_t> prompt, int64_t max_tokens,
                                             const v1::RowSampling& sampling, int64_t vocab_size);

  // The log probability of a prompt's token at a position.
  static float ScoreOf(int64_t position, int32_t token) {
    return -static_cast<float>(position) - static_cast<float>(token) / 64;
  }

 private:
  static constexpr int64_t kTokens = kvstore::kBlockTokens;

  struct BlockState {
    bool kept = false;
    int64_t users = 0;         // slots
    uint64_t fingerprint = 0;  // behind its last token; set when full
    std::string prefix_hash;   // set when sealed
    bool restoring = false;
    bool restored = false;  // and not used since
    bool from_peer = false;
  };
  struct Stored {
    uint64_t fingerprint = 0;
    std::vector<uint32_t> tokens;
  };
  struct Slot {
    v1::SequenceStart start;  // without tokens
    int64_t prompt_tokens = 0;
    std::vector<int32_t> tokens;
    int64_t given_tokens = 0;
    int64_t from_disk = 0;  // blocks
    int64_t from_peer = 0;
    int64_t kv_length = 0;
    std::vector<uint64_t> blocks = {};
    bool is_left = false;  // it had no row in a step: it has had its last one
  };

  static uint64_t Mix(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x7F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }
  static uint64_t HashBytes(absl::string_view bytes) {
    uint64_t h = 1;
    for (char c : bytes) h = Mix(h, static_cast<uint8_t>(c));
    return h;
  }
  static int32_t NextToken(absl::Span<const int32_t> tokens, int64_t prompt_tokens,
                           const v1::RowSampling& sampling, int64_t vocab_size);
  // KV fingerprint of the sequence's first `length` positions, computed afresh.
  static uint64_t Fingerprint(const Slot& slot, int64_t length);
  static absl::Status Bad(absl::string_view what, uint64_t which) {
    return absl::FailedPreconditionError(absl::StrCat("illegal plan: ", what, ": ", which));
  }

  absl::Status Seal(const v1::BlockSeal& seal);
  absl::Status Free(uint32_t slot);
  absl::Status Persist(const v1::BlockPersist& persist);
  // Forgets the stored blocks that the order covers.
  void Erase(const v1::Erase& erase, v1::TierReport& report);
  absl::Status Restore(const v1::BlockRestore& restore);
  void EndWrite(const std::string& hash, v1::TierReport& report);
  void EndRead(uint64_t id, bool fails, v1::TierReport& report);
  void EraseIfUnused(uint64_t id);
  absl::Status Start(const v1::SequenceStart& start);
  static absl::Status Score(const v1::StepRow& row, const Slot& slot, v1::RowResult& result);
  absl::Status RunRow(const v1::StepRow& row, v1::StepReply& reply);
  absl::Status CheckRow(const v1::StepRow& row, const Slot& slot) const;
  absl::Status CheckPlan(const v1::StepPlan& plan) const;
  void LeaveThoseWithoutRow(const v1::StepPlan& plan);
  absl::Status CheckRoom() const;

  const SymbolicWorkerOptions options_;
  absl::flat_hash_map<uint64_t, BlockState> blocks_;
  absl::flat_hash_map<uint32_t, Slot> slots_;
  absl::flat_hash_set<uint64_t> used_ids_;
  uint64_t last_step_ = 0;

  std::map<std::string, Stored> stored_;  // by prefix hash
  std::map<std::string, Stored> writes_;  // not yet there
  std::map<std::string, Stored> at_peer_;
  std::map<std::string, std::string> owners_;  // of sealed blocks, by prefix hash
  std::vector<v1::Erase> erases_;
  std::vector<uint64_t> restores_;  // ids of blocks that are being read
  int64_t failing_reads_ = 0;
  int64_t sound_reads_ = 0;
  int64_t reads_done_ = 0;
};

inline int32_t SymbolicWorker::NextToken(absl::Span<const int32_t> tokens, int64_t prompt_tokens,
                                         const v1::RowSampling& sampling, int64_t vocab_size) {
  uint64_t h = sampling.seed();
  for (int32_t token : tokens) h = Mix(h, static_cast<uint64_t>(token));
  auto token = static_cast<int32_t>(h % static_cast<uint64_t>(vocab_size));
  const int64_t generated = static_cast<int64_t>(tokens.size()) - prompt_tokens;
  const auto is_stop = [&](int32_t t) {
    for (uint32_t stop : sampling.stop_token_ids()) {
      if (static_cast<uint32_t>(t) == stop) return true;
    }
    return false;
  };
  while (generated < int64_t{sampling.min_tokens()} && is_stop(token)) {
    token = static_cast<int32_t>((token + 1) % vocab_size);
  }
  return token;
}

inline std::vector<int32_t> SymbolicWorker::ExpectedTokens(std::vector<int32_t> prompt,
                                                           int64_t max_tokens,
                                                           const v1::RowSampling& sampling,
                                                           int64_t vocab_size) {
  const size_t prompt_tokens = prompt.size();
  std::vector<int32_t> answer;
  while (static_cast<int64_t>(answer.size()) < max_tokens) {
    const int32_t token =
        NextToken(prompt, static_cast<int64_t>(prompt_tokens), sampling, vocab_size);
    prompt.push_back(token);
    answer.push_back(token);
    if (answer.size() <= sampling.min_tokens()) continue;
    for (uint32_t stop : sampling.stop_token_ids()) {
      if (static_cast<uint32_t>(token) == stop) return answer;
    }
  }
  return answer;
}

inline uint64_t SymbolicWorker::Fingerprint(const Slot& slot, int64_t length) {
  const bool sparse_decode = coordinator::IsSparse(slot.start.decode());
  const int64_t decode_begin =
      slot.prompt_tokens - (sparse_decode ? int64_t{slot.start.tail_tokens()} : 0);
  const uint64_t prefill = HashBytes(coordinator::CanonicalBytes(slot.start.prefill()));
  uint64_t decode = HashBytes(coordinator::CanonicalBytes(slot.start.decode()));
  // Reading block by block and token by token find the same only when both attend to everything.
  if (sparse_decode) decode = Mix(decode, 1);
  uint64_t h = 7;
  for (int64_t i = 0; i < length; ++i) {
    h = Mix(h, static_cast<uint64_t>(slot.tokens[static_cast<size_t>(i)]));
    h = Mix(h, i < decode_begin ? prefill : decode);
  }
  return h;
}

inline absl::Status SymbolicWorker::Seal(const v1::BlockSeal& seal) {
  const auto it = blocks_.find(seal.block_id());
  if (it == blocks_.end()) return Bad("seals an unknown block", seal.block_id());
  BlockState& block = it->second;
  if (!block.prefix_hash.empty()) return Bad("seals a block twice", seal.block_id());
  if (block.fingerprint == 0) return Bad("seals a block that is not full", seal.block_id());
  if (seal.prefix_hash().size() != 32) return Bad("seals without a hash", seal.block_id());
  if (seal.owner().size() != 32) return Bad("seals without an owner", seal.block_id());
  block.prefix_hash = seal.prefix_hash();
  owners_[seal.prefix_hash()] = seal.owner();
  block.kept = true;
  return absl::OkStatus();
}

inline void SymbolicWorker::EraseIfUnused(uint64_t id) {
  const auto it = blocks_.find(id);
  if (it != blocks_.end() && !it->second.kept && it->second.users == 0) blocks_.erase(it);
}

inline absl::Status SymbolicWorker::Free(uint32_t slot) {
  const auto it = slots_.find(slot);
  if (it == slots_.end()) return Bad("frees a free slot", slot);
  for (uint64_t id : it->second.blocks) {
    --blocks_.at(id).users;
    EraseIfUnused(id);
  }
  slots_.erase(it);
  return absl::OkStatus();
}

inline absl::Status SymbolicWorker::Start(const v1::SequenceStart& start) {
  if (start.slot() >= static_cast<uint64_t>(options_.max_num_seqs)) {
    return Bad("starts in a slot there is not", start.slot());
  }
  if (slots_.contains(start.slot())) return Bad("starts in a slot in use", start.slot());
  Slot slot = {.start = start,
               .prompt_tokens = start.num_prompt_tokens(),
               .tokens = {start.tokens().begin(), start.tokens().end()},
               .given_tokens = start.tokens_size()};
  slot.start.clear_tokens();
  for (uint64_t id : start.cached_blocks()) {
    slot.kv_length += kTokens;
    if (slot.kv_length >= slot.given_tokens) return Bad("leaves nothing to compute", id);
    BlockState& block = blocks_.at(id);
    if (block.restoring) return Bad("uses a block that is being restored", id);
    if (block.fingerprint != Fingerprint(slot, slot.kv_length)) {
      return Bad("uses a cached block that is not this prefix", id);
    }
    ++block.users;
    if (std::exchange(block.restored, false)) ++(block.from_peer ? slot.from_peer : slot.from_disk);
    slot.blocks.push_back(id);
  }
  slots_.emplace(start.slot(), std::move(slot));
  return absl::OkStatus();
}

inline absl::Status SymbolicWorker::CheckRow(const v1::StepRow& row, const Slot& slot) const {
  const int64_t end = int64_t{row.begin()} + row.num_tokens();
  const int64_t length = static_cast<int64_t>(slot.tokens.size());
  if (row.begin() != slot.kv_length) return Bad("row does not begin behind the KV", row.slot());
  if (row.num_tokens() == 0 || end > length) return Bad("row has tokens there are not", row.slot());
  if (end < slot.prompt_tokens && end % kTokens != 0) return Bad("crooked chunk", row.slot());
  if (row.sample() != (end == length)) return Bad("samples at the wrong place", row.slot());
  const int64_t blocks = static_cast<int64_t>(slot.blocks.size()) + row.new_blocks_size();
  if (blocks != (end + kTokens - 1) / kTokens) return Bad("wrong number of blocks", row.slot());
  for (uint64_t id : row.new_blocks()) {
    if (used_ids_.contains(id)) return Bad("new block is not new", id);
  }
  return absl::OkStatus();
}

// A score is known from the token and its place.
inline absl::Status SymbolicWorker::Score(const v1::StepRow& row, const Slot& slot,
                                          v1::RowResult& result) {
  const int64_t begin = row.score_begin(), end = row.score_end();
  if (begin == end) return absl::OkStatus();
  const int64_t row_end = int64_t{row.begin()} + row.num_tokens();
  if (begin < row.begin() || begin > end || end > std::min(row_end, slot.prompt_tokens - 1)) {
    return Bad("scores positions that it does not compute, or past the prompt", row.slot());
  }
  v1::PromptLogprobs& scores = *result.mutable_prompt_logprobs();
  scores.set_index(row.score_begin() + 1);
  scores.set_top_count(slot.start.sampling().prompt_logprobs());
  for (int64_t i = begin + 1; i <= end; ++i) {
    scores.add_logprobs(ScoreOf(i, slot.tokens[static_cast<size_t>(i)]));
    for (uint32_t n = 0; n < scores.top_count(); ++n) {
      scores.add_top_token_ids(n);
      scores.add_top_logprobs(-static_cast<float>(n));
    }
  }
  return absl::OkStatus();
}

inline absl::Status SymbolicWorker::RunRow(const v1::StepRow& row, v1::StepReply& reply) {
  const auto it = slots_.find(row.slot());
  if (it == slots_.end()) return Bad("row of a free slot", row.slot());
  Slot& slot = it->second;
  if (slot.is_left) return Bad("a decoding sequence had no row in a step", row.slot());
  KVASIR_RETURN_IF_ERROR(CheckRow(row, slot));
  for (uint64_t id : row.new_blocks()) {
    used_ids_.insert(id);
    blocks_[id].users = 1;
    slot.blocks.push_back(id);
  }
  for (int64_t i = 0; i < row.num_tokens(); ++i) {
    const size_t block = static_cast<size_t>(slot.kv_length / kTokens);
    if (!blocks_.at(slot.blocks[block]).prefix_hash.empty()) {
      return Bad("writes into a sealed block", slot.blocks[block]);
    }
    if (++slot.kv_length % kTokens == 0) {
      blocks_.at(slot.blocks[block]).fingerprint = Fingerprint(slot, slot.kv_length);
    }
  }
  v1::RowResult& result = *reply.add_results();
  result.set_slot(row.slot());
  v1::RowAccounting& accounting = *result.mutable_accounting();
  accounting.mutable_decode()->set_blocks_total(slot.blocks.size());
  accounting.set_cached_device_tokens(static_cast<uint32_t>(
      (slot.start.cached_blocks_size() - slot.from_disk - slot.from_peer) * kTokens));
  accounting.set_cached_peer_tokens(static_cast<uint32_t>(slot.from_peer * kTokens));
  accounting.set_cached_disk_tokens(static_cast<uint32_t>(slot.from_disk * kTokens));
  KVASIR_RETURN_IF_ERROR(Score(row, slot, result));
  if (!row.sample()) return absl::OkStatus();
  const int32_t token =
      NextToken(slot.tokens, slot.prompt_tokens, slot.start.sampling(), options_.vocab_size);
  slot.tokens.push_back(token);
  result.set_token_id(static_cast<uint32_t>(token));
  if (slot.start.sampling().has_logprobs()) {  // one that is known from the token
    result.mutable_logprobs()->set_logprob(-static_cast<float>(token));
    for (uint32_t n = 0; n < slot.start.sampling().logprobs(); ++n) {
      result.mutable_logprobs()->add_top()->set_token_id(n);
    }
  }
  reply.set_token_hash(Mix(reply.token_hash(), static_cast<uint64_t>(token)));
  return absl::OkStatus();
}

inline absl::Status SymbolicWorker::CheckPlan(const v1::StepPlan& plan) const {
  int64_t tokens = 0;
  absl::flat_hash_set<uint32_t> slots;
  for (const v1::StepRow& row : plan.rows()) {
    tokens += row.num_tokens();
    if (!slots.insert(row.slot()).second) return Bad("two rows of a slot", row.slot());
  }
  if (tokens > options_.max_num_batched_tokens) {
    return Bad("too many tokens", static_cast<uint64_t>(tokens));
  }
  for (const v1::SequenceStart& start : plan.starts()) {
    if (!slots.contains(start.slot())) return Bad("starts without a row", start.slot());
  }
  return absl::OkStatus();
}

// All of them have one in every step; but a plan ahead of an answer has none for a sequence whose
// last token it waits for.
inline void SymbolicWorker::LeaveThoseWithoutRow(const v1::StepPlan& plan) {
  absl::flat_hash_set<uint32_t> slots;
  for (const v1::StepRow& row : plan.rows()) slots.insert(row.slot());
  for (auto& [id, slot] : slots_) {
    if (slot.kv_length >= slot.given_tokens && !slots.contains(id)) slot.is_left = true;
  }
}

inline absl::Status SymbolicWorker::CheckRoom() const {
  int64_t unsealed = 0;
  for (const auto& [id, block] : blocks_) unsealed += block.prefix_hash.empty() ? 1 : 0;
  if (unsealed > options_.device_blocks) {
    return Bad("device tier overflows, unsealed blocks", static_cast<uint64_t>(unsealed));
  }
  if (num_blocks() > options_.host_blocks) {
    return Bad("host tier overflows, blocks", static_cast<uint64_t>(num_blocks()));
  }
  return absl::OkStatus();
}

inline absl::StatusOr<v1::StepReply> SymbolicWorker::Execute(const v1::StepPlan& plan) {
  if (plan.step() != last_step_ + 1) return Bad("step is not the next", plan.step());
  last_step_ = plan.step();
  v1::StepReply reply;
  reply.set_group_epoch(plan.group_epoch());
  reply.set_step(plan.step());
  for (const v1::BlockSeal& seal : plan.seals()) KVASIR_RETURN_IF_ERROR(Seal(seal));
  for (uint32_t slot : plan.free_slots()) KVASIR_RETURN_IF_ERROR(Free(slot));
  for (const v1::BlockPersist& persist : plan.persists()) KVASIR_RETURN_IF_ERROR(Persist(persist));
  erases_.insert(erases_.end(), plan.erases().begin(), plan.erases().end());
  for (uint64_t id : plan.drop_blocks()) {
    const auto it = blocks_.find(id);
    if (it == blocks_.end()) continue;
    it->second.kept = false;
    EraseIfUnused(id);
  }
  for (const v1::BlockRestore& restore : plan.restores()) KVASIR_RETURN_IF_ERROR(Restore(restore));
  KVASIR_RETURN_IF_ERROR(CheckPlan(plan));
  for (const v1::SequenceStart& start : plan.starts()) {
    for (uint64_t id : start.cached_blocks()) {
      const auto it = blocks_.find(id);
      if (it == blocks_.end() || !it->second.kept) reply.add_missing_blocks(id);
    }
  }
  if (reply.missing_blocks_size() > 0) return reply;
  LeaveThoseWithoutRow(plan);
  for (const v1::SequenceStart& start : plan.starts()) KVASIR_RETURN_IF_ERROR(Start(start));
  for (const v1::StepRow& row : plan.rows()) KVASIR_RETURN_IF_ERROR(RunRow(row, reply));
  KVASIR_RETURN_IF_ERROR(CheckRoom());
  return reply;
}

inline bool SymbolicWorker::LoseOneBlock(uint64_t random) {
  std::vector<uint64_t> idle;
  for (const auto& [id, block] : blocks_) {
    if (block.kept && block.users == 0 && !block.restoring) idle.push_back(id);
  }
  if (idle.empty()) return false;
  std::sort(idle.begin(), idle.end());  // so that a seed plays the same again
  blocks_.erase(idle[random % idle.size()]);
  return true;
}

}  // namespace kvasir::testing

#include "tests/support/symbolic_worker_disk.h"  // IWYU pragma: export
