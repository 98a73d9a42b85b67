#include "worker/engine/slot_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/policy_check.h"
#include "worker/engine/prefix_reads.h"

namespace kvasir::worker {
namespace {

using kernels::BlockId;
using kernels::kPageTokens;
using kvstore::Block;

BlockId ToBlockId(uint64_t id) { return BlockId(static_cast<int64_t>(id)); }

int64_t BlocksFor(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

template <typename... Args>
absl::Status BadPlan(const Args&... args) {
  return absl::InternalError(absl::StrCat("wrong plan: ", args...));
}

absl::Status ParseHash(const std::string& bytes, kvstore::PrefixHash& hash) {
  if (bytes.size() != hash.size()) {
    return BadPlan("has a hash of ", bytes.size(), " bytes instead of ", hash.size());
  }
  std::copy(bytes.begin(), bytes.end(), hash.begin());
  return absl::OkStatus();
}

absl::Status ParseHash(uint64_t block_id, const std::string& bytes, kvstore::PrefixHash& hash) {
  if (bytes.size() != hash.size()) {
    return BadPlan("gives block ", block_id, " a hash of ", bytes.size(), " bytes instead of ",
                   hash.size());
  }
  return ParseHash(bytes, hash);
}

// Leaves zeros where no owner is named.
absl::Status ParseOwner(uint64_t block_id, const std::string& bytes, kvstore::PrefixHash& owner) {
  return bytes.empty() ? absl::OkStatus() : ParseHash(block_id, bytes, owner);
}

absl::StatusOr<std::vector<kvstore::PrefixHash>> ParseHashes(
    const google::protobuf::RepeatedPtrField<std::string>& all) {
  std::vector<kvstore::PrefixHash> hashes;
  for (const std::string& bytes : all)
    KVASIR_RETURN_IF_ERROR(ParseHash(bytes, hashes.emplace_back()));
  return hashes;
}

// Converts the store's errors: its refusal of a plan's request means that the plan is wrong, except
// for lack of memory.
absl::Status FromStore(const absl::Status& status) {
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  return BadPlan(status.ToString());
}

kernels::OnViolation ToOnViolation(absl::string_view name) {
  if (name == "dense") return kernels::OnViolation::kDense;
  if (name == "widen") return kernels::OnViolation::kWiden;
  return kernels::OnViolation::kReport;
}

// Returns `declared` with the numbers of one sequence.
v1::AttentionPolicy WithNumbers(v1::AttentionPolicy declared, const v1::AttentionPolicy& numbers) {
  declared.clear_layer_budgets();
  declared.MergeFrom(numbers);
  return declared;
}

// Finds numbers that kernels would refuse.
absl::Status CheckNumbers(const PolicyShape& shape, const v1::SequenceStart& start) {
  if (start.decode().quality().min_mass() != 0 && shape.decode.quality().min_mass() == 0) {
    return absl::InvalidArgumentError(
        "decode.quality.min_mass is set; the declared policy has none, so that the KV may keep no "
        "key codes to estimate it by");
  }
  KVASIR_RETURN_IF_ERROR(v1::CheckWindow("prefill", WithNumbers(shape.prefill, start.prefill())));
  return v1::CheckWindow("decode", WithNumbers(shape.decode, start.decode()));
}

PhasePolicy MakePhase(int64_t selector, const v1::AttentionPolicy& policy) {
  PhasePolicy phase = {.selector = selector,
                       .numbers = NumbersOf(policy),
                       .dense_layers = policy.dense_layers(),
                       .layer_budgets = {}};
  for (const v1::LayerBudget& layers : policy.layer_budgets()) {
    phase.layer_budgets.push_back({.begin = layers.first_layer(),
                                   .end = int64_t{layers.last_layer()} + 1,
                                   .budget_tokens = layers.token_budget()});
  }
  return phase;
}

}  // namespace

kernels::PolicyNumbers NumbersOf(const v1::AttentionPolicy& policy) {
  const v1::ReusePolicy& reuse = policy.reuse();
  const v1::QualityPolicy& quality = policy.quality();
  return {.sink_tokens = policy.sink_tokens(),
          .window_tokens = std::max<int64_t>(1, policy.window_tokens()),
          // `all` has no budget: it chooses nothing besides sink and window.
          .budget_tokens = policy.has_all() ? 0 : policy.token_budget(),
          .top_p = policy.top_p() == 0 ? 1 : policy.top_p(),
          .patience = policy.patience(),
          .reuse = {.interval = reuse.interval(),
                    .theta = reuse.theta(),
                    .theta_force = reuse.theta_force(),
                    .max_age = reuse.max_age()},
          .quality = {.min_mass = quality.min_mass(),
                      .on_violation = ToOnViolation(quality.on_violation()),
                      .max_budget_tokens = quality.max_budget_tokens()}};
}

SlotTable::SlotTable(SlotTableOptions options, kvstore::KvStore& store)
    : options_(std::move(options)),
      store_(store),
      slots_(static_cast<size_t>(options_.num_slots)) {}

Sequence& SlotTable::at(int64_t slot) {
  std::optional<Sequence>& sequence = slots_[static_cast<size_t>(slot)];
  KVASIR_CHECK(sequence.has_value());
  return *sequence;
}

const Sequence* SlotTable::Find(uint32_t slot) const {
  if (slot >= slots_.size() || !slots_[slot].has_value()) return nullptr;
  return &*slots_[slot];
}

bool SlotTable::IsLeftOut(uint32_t slot) const {
  const Sequence* sequence = Find(slot);
  return sequence != nullptr && sequence->is_left_out;
}

int64_t SlotTable::selection_memory_bytes() const {
  int64_t bytes = 0;
  for (const std::optional<Sequence>& sequence : slots_) {
    if (sequence.has_value() && sequence->memory != nullptr)
      bytes += sequence->memory->size_bytes();
  }
  return bytes;
}

absl::Status SlotTable::Seal(const v1::BlockSeal& seal) {
  const auto open = open_blocks_.find(ToBlockId(seal.block_id()));
  if (open == open_blocks_.end()) {
    return BadPlan("seals block ", seal.block_id(), ", which is not an open block of a sequence");
  }
  const Sequence& sequence = at(open->second.slot);
  if (sequence.sound_length < (open->second.index + 1) * kPageTokens) {
    return BadPlan("seals block ", seal.block_id(), " of slot ", open->second.slot,
                   ", whose KV is ", sequence.failed.ok() ? "not complete" : "not valid");
  }
  kvstore::PrefixHash hash;
  KVASIR_RETURN_IF_ERROR(ParseHash(seal.block_id(), seal.prefix_hash(), hash));
  kvstore::PrefixHash owner{};
  KVASIR_RETURN_IF_ERROR(ParseOwner(seal.block_id(), seal.owner(), owner));
  const auto tokens = absl::MakeConstSpan(sequence.tokens)
                          .subspan(static_cast<size_t>(open->second.index * kPageTokens),
                                   static_cast<size_t>(kPageTokens));
  KVASIR_RETURN_IF_ERROR(FromStore(store_.Seal(open->first, hash, tokens, owner)));
  open_blocks_.erase(open);
  return absl::OkStatus();
}

absl::Status SlotTable::Free(uint32_t slot) {
  if (Find(slot) == nullptr) return BadPlan("frees slot ", slot, ", which is not taken");
  UnbindFrom(slot, 0);
  slots_[slot].reset();
  return absl::OkStatus();
}

absl::Status SlotTable::Persist(const v1::BlockPersist& persist) {
  if (persist.tokens_size() != kPageTokens) {
    return BadPlan("stores block ", persist.block_id(), " with ", persist.tokens_size(),
                   " tokens instead of ", kPageTokens);
  }
  const std::vector<int32_t> tokens(persist.tokens().begin(), persist.tokens().end());
  store_.Persist(ToBlockId(persist.block_id()), tokens);
  return absl::OkStatus();
}

absl::Status SlotTable::Erase(const v1::Erase& erase) {
  kvstore::TierErase order = {.ticket = erase.id()};
  if (erase.what_case() == v1::Erase::WHAT_NOT_SET) {
    return BadPlan("erases nothing that it names, in order ", erase.id());
  }
  if (erase.has_owner()) {
    KVASIR_RETURN_IF_ERROR(ParseHash(erase.owner(), order.owner.emplace()));
  } else if (erase.has_blocks()) {
    KVASIR_ASSIGN_OR_RETURN(const auto hashes, ParseHashes(erase.blocks().prefix_hash()));
    order.blocks.emplace(hashes.begin(), hashes.end());
  }
  store_.Erase(std::move(order));
  return absl::OkStatus();
}

absl::Status SlotTable::Import(const v1::BlockImport& block) {
  if (block.tokens_size() != kPageTokens) {
    return BadPlan("imports block ", block.block_id(), " with ", block.tokens_size(),
                   " tokens instead of ", kPageTokens);
  }
  kvstore::BlockIdentity identity;
  KVASIR_RETURN_IF_ERROR(ParseHash(block.block_id(), block.prefix_hash(), identity.hash));
  KVASIR_RETURN_IF_ERROR(ParseHash(block.block_id(), block.owner(), identity.owner));
  std::copy(block.tokens().begin(), block.tokens().end(), identity.tokens.begin());
  std::vector<kvstore::HeadPart> parts;
  for (const v1::HeadExtent& part : block.heads()) {
    const auto* bytes = reinterpret_cast<const std::byte*>(part.extent().data());
    parts.push_back({.head = part.head(), .extent = {bytes, part.extent().size()}});
  }
  const absl::Status made = store_.Import(ToBlockId(block.block_id()), identity, parts);
  return absl::IsAlreadyExists(made) ? BadPlan(made.ToString()) : made;
}

absl::Status SlotTable::PinDisk(const v1::StepPlan& plan) {
  KVASIR_ASSIGN_OR_RETURN(const auto unpins, ParseHashes(plan.disk_unpins()));
  KVASIR_ASSIGN_OR_RETURN(const auto pins, ParseHashes(plan.disk_pins()));
  store_.UnpinBelow(unpins);
  store_.PinBelow(pins);
  return absl::OkStatus();
}

absl::Status SlotTable::Restore(const v1::BlockRestore& restore) {
  kvstore::PrefixHash hash;
  KVASIR_RETURN_IF_ERROR(ParseHash(restore.block_id(), restore.prefix_hash(), hash));
  kvstore::PrefixHash owner{};
  KVASIR_RETURN_IF_ERROR(ParseOwner(restore.block_id(), restore.owner(), owner));
  const absl::Status started = store_.Restore(ToBlockId(restore.block_id()), hash, owner);
  return absl::IsAlreadyExists(started) ? BadPlan(started.ToString()) : started;
}

std::vector<BlockId> SlotTable::FindMissing(const v1::StepPlan& plan) const {
  std::vector<BlockId> missing;
  for (const v1::SequenceStart& start : plan.starts()) {
    for (const uint64_t id : start.cached_blocks()) {
      if (!store_.Holds(ToBlockId(id))) missing.push_back(ToBlockId(id));
    }
  }
  return missing;
}

absl::Status SlotTable::CheckStart(const v1::SequenceStart& start) const {
  const auto bad = [&](const auto&... what) {
    return BadPlan("sequence ", start.sequence_id(), ": ", what...);
  };
  if (start.slot() >= slots_.size()) {
    return bad("slot ", start.slot(), " of ", slots_.size());
  }
  if (slots_[start.slot()].has_value()) return bad("slot ", start.slot(), " is taken");
  const int64_t num_tokens = start.tokens_size();
  if (num_tokens == 0 || num_tokens > options_.max_model_len) {
    return bad(num_tokens, " tokens of prompt and answer; it must have 1 to ",
               options_.max_model_len);
  }
  for (const auto* ids : {&start.tokens(), &start.sampling().stop_token_ids()}) {
    const auto outside = std::find_if(ids->begin(), ids->end(),
                                      [&](uint32_t token) { return token >= options_.vocab_size; });
    if (outside != ids->end()) {
      return bad("token ", *outside, " of a vocabulary of ", options_.vocab_size);
    }
  }
  if (start.num_prompt_tokens() == 0 || start.num_prompt_tokens() > num_tokens) {
    return bad("a prompt of ", start.num_prompt_tokens(), " of its tokens; it must have 1 to ",
               num_tokens);
  }
  if (start.cached_blocks_size() > (num_tokens - 1) / kPageTokens) {
    return bad(start.cached_blocks_size(), " cached blocks for ", num_tokens,
               " tokens leave nothing to compute");
  }
  if (start.policy_index() >= options_.policies.size()) {
    return bad("policy ", start.policy_index(), " of ", options_.policies.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<CachedPrefix> SlotTable::Start(const v1::SequenceStart& start) {
  KVASIR_RETURN_IF_ERROR(CheckStart(start));
  const PolicyShape& shape = options_.policies[start.policy_index()];
  const int64_t prompt_size = start.num_prompt_tokens();
  Sequence& sequence = slots_[start.slot()].emplace();
  sequence.id = kernels::SequenceId(static_cast<int64_t>(start.sequence_id()));
  sequence.tokens.assign(start.tokens().begin(), start.tokens().end());
  sequence.prompt_size = prompt_size;
  sequence.given_size = start.tokens_size();
  sequence.sampling = start.sampling();
  sequence.policy = start.policy_index();
  sequence.prefill = MakePhase(shape.prefill_selector, start.prefill());
  sequence.decode = MakePhase(shape.decode_selector, start.decode());
  sequence.failed = CheckNumbers(shape, start);
  sequence.is_left_out = !sequence.failed.ok();
  sequence.decode_begin = shape.decode_is_dense
                              ? prompt_size
                              : std::max<int64_t>(0, prompt_size - int64_t{start.tail_tokens()});
  CachedPrefix cached;
  for (const uint64_t id : start.cached_blocks()) {
    const BlockId block_id = ToBlockId(id);
    const kvstore::BlockResidency where = store_.Where(block_id);
    const bool on_device = where.device_pages == options_.pages_per_block;
    (where.restored && where.from_peer ? cached.peer_tokens
     : where.restored                  ? cached.disk_tokens
     : on_device                       ? cached.device_tokens
                                       : cached.host_tokens) += kPageTokens;
    absl::StatusOr<Block> block = store_.Get(block_id);
    if (!block.ok()) return FromStore(block.status());
    const int64_t index = static_cast<int64_t>(sequence.blocks.size());
    store_.Bind(start.slot(), index, *std::move(block));
    sequence.blocks.push_back(block_id);
  }
  sequence.kv_length = static_cast<int64_t>(sequence.blocks.size()) * kPageTokens;
  sequence.sound_length = sequence.kv_length;
  const bool all_on_device = cached.device_tokens == sequence.kv_length;
  if (!all_on_device && sequence.failed.ok() &&
      ReadWholePrefix(sequence, {shape.prefill, sequence.prefill}, {shape.decode, sequence.decode},
                      options_.num_layers, options_.layer_windows)) {
    store_.Promote(start.slot());
  }
  return cached;
}

absl::Status SlotTable::CheckRow(const v1::StepRow& row, const Sequence& sequence) const {
  const int64_t begin = row.begin();
  const int64_t end = begin + row.num_tokens();
  const int64_t known = static_cast<int64_t>(sequence.tokens.size());
  const auto bad = [&](const auto&... what) {
    return BadPlan("slot ", row.slot(), ", positions [", begin, ", ", end, "): ", what...);
  };
  if (row.num_tokens() == 0) return bad("nothing to compute");
  if (begin > sequence.kv_length) return bad("the KV ends at ", sequence.kv_length);
  if (end > known) return bad("the sequence has ", known, " tokens");
  if (end > options_.max_model_len) return bad("the longest context is ", options_.max_model_len);
  if (row.sample() && end < sequence.given_size) {
    return bad("sampling inside the ", sequence.given_size, " tokens that are known");
  }
  if (row.score_begin() != row.score_end() &&
      (row.score_begin() < begin || row.score_begin() > row.score_end() ||
       row.score_end() > std::min(end, sequence.prompt_size - 1))) {
    return bad("scoring [", row.score_begin(), ", ", row.score_end(), ") in a prompt of ",
               sequence.prompt_size, " tokens");
  }
  // The cut into query tiles must not depend on the chunks.
  if (begin < sequence.decode_begin && begin % kPageTokens != 0) {
    return bad("a prefill chunk must begin at a multiple of ", kPageTokens);
  }
  if (end < sequence.decode_begin && end % kPageTokens != 0) {
    return bad("a prefill chunk must end at a multiple of ", kPageTokens,
               " or with the part of the prompt that is read in blocks");
  }
  const int64_t kept = std::min<int64_t>(BlocksFor(begin), std::ssize(sequence.blocks));
  if (row.new_blocks_size() != BlocksFor(end) - kept) {
    return bad("needs ", BlocksFor(end) - kept, " new blocks, the plan names ",
               row.new_blocks_size());
  }
  return absl::OkStatus();
}

absl::StatusOr<RowWork> SlotTable::Prepare(const v1::StepRow& row,
                                           std::vector<Truncation>& truncations) {
  if (Find(row.slot()) == nullptr) return BadPlan("a row of slot ", row.slot(), ", not taken");
  Sequence& sequence = at(row.slot());
  KVASIR_RETURN_IF_ERROR(CheckRow(row, sequence));
  KVASIR_RETURN_IF_ERROR(Truncate(row.slot(), row.begin(), truncations));
  KVASIR_RETURN_IF_ERROR(OpenBlocks(row, sequence));
  const int64_t end = int64_t{row.begin()} + row.num_tokens();
  sequence.tokens.resize(static_cast<size_t>(std::max(sequence.given_size, end)));
  return RowWork{.slot = row.slot(),
                 .begin = row.begin(),
                 .num_tokens = row.num_tokens(),
                 .sample = row.sample(),
                 .score_begin = row.score_begin(),
                 .score_end = row.score_end(),
                 .observe = row.observe(),
                 .sequence = &sequence};
}

absl::Status SlotTable::Truncate(int64_t slot, int64_t length,
                                 std::vector<Truncation>& truncations) {
  Sequence& sequence = at(slot);
  const int64_t rest = length % kPageTokens;
  if (rest != 0 && length < sequence.kv_length) {
    const int64_t index = length / kPageTokens;
    const BlockId cut = sequence.blocks[static_cast<size_t>(index)];
    if (!open_blocks_.contains(cut)) {
      return BadPlan("slot ", slot, " is truncated to ", length, ", inside the sealed block ",
                     cut.value);
    }
    truncations.push_back({.slot = slot, .block = index, .num_tokens = rest});
  }
  UnbindFrom(slot, BlocksFor(length));
  sequence.kv_length = length;
  sequence.sound_length = std::min(sequence.sound_length, length);
  return absl::OkStatus();
}

absl::Status SlotTable::OpenBlocks(const v1::StepRow& row, Sequence& sequence) {
  const int64_t first = std::ssize(sequence.blocks);
  for (const uint64_t id : row.new_blocks()) {
    absl::StatusOr<Block> block = store_.Open(ToBlockId(id));
    if (!block.ok()) {
      UnbindFrom(row.slot(), first);
      return FromStore(block.status());
    }
    const int64_t index = std::ssize(sequence.blocks);
    store_.Bind(row.slot(), index, *std::move(block));
    sequence.blocks.push_back(ToBlockId(id));
    open_blocks_[ToBlockId(id)] = {.slot = row.slot(), .index = index};
  }
  return absl::OkStatus();
}

void SlotTable::UnbindFrom(int64_t slot, int64_t first_index) {
  Sequence& sequence = at(slot);
  if (first_index >= std::ssize(sequence.blocks)) return;
  for (auto block = sequence.blocks.begin() + first_index; block != sequence.blocks.end();
       ++block) {
    open_blocks_.erase(*block);
  }
  sequence.blocks.resize(static_cast<size_t>(first_index));
  store_.Unbind(slot, first_index);
}

}  // namespace kvasir::worker
