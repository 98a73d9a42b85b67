#include "coordinator/scheduling/context_blocks.h"

#include <algorithm>

#include "coordinator/policy/policy.h"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::PrefixHash;

// One in this many blocks of the disk tier is left to blocks that nobody pins.
constexpr int64_t kUnpinnedOnDisk = 8;

std::string BytesOf(const PrefixHash& hash) { return {hash.begin(), hash.end()}; }

}  // namespace

PrefixHash ContextBlocks::ScopeOf(const std::string& tenant,
                                  const v1::AttentionPolicy& prefill) const {
  return kvstore::HashScope({.tenant = tenant,
                             .weights_hash = options_.weights_hash,
                             .kv_form = options_.kv_form,
                             .prefill_policy = CanonicalBytes(prefill)});
}

kvstore::PrefixMatch ContextBlocks::Match(const ContextChain& chain) const {
  // Match leaves one token to compute, so it is given one more than whole blocks.
  std::vector<int32_t> tokens = *chain.tokens;
  tokens.push_back(0);
  return index_.Match(ScopeOf(chain.tenant, chain.prefill), tokens);
}

std::vector<PrefixHash> ContextBlocks::HashesOf(const ContextChain& chain, int64_t count) const {
  std::vector<PrefixHash> hashes;
  PrefixHash parent = ScopeOf(chain.tenant, chain.prefill);
  for (int64_t i = 0; i < count; ++i) {
    const auto tokens =
        absl::MakeConstSpan(*chain.tokens)
            .subspan(static_cast<size_t>(i * kBlockTokens), static_cast<size_t>(kBlockTokens));
    parent = kvstore::HashBlock(parent, tokens, {});
    hashes.push_back(parent);
  }
  return hashes;
}

// --- pins ---------------------------------------------------------------------------------------

PinnedBlocks ContextBlocks::PinHost(const ContextChain& chain, int64_t most) {
  UnpinHost(chain.context);
  const int64_t longest = (options_.longest_sequence + kBlockTokens - 1) / kBlockTokens;
  const int64_t room =
      std::max<int64_t>(0, index_.stats().capacity_blocks - longest - pinned_host_blocks());
  PinnedBlocks pinned = {.granted = std::min({chain.num_blocks(), most, room})};
  kvstore::PrefixMatch match = Match(chain);
  pinned.present = std::min(pinned.granted, std::ssize(match.blocks));
  match.blocks.resize(static_cast<size_t>(pinned.present));
  if (pinned.present > 0) host_[chain.context] = std::move(match.blocks);
  return pinned;
}

PinnedBlocks ContextBlocks::PinDisk(const ContextChain& chain, int64_t most) {
  UnpinDisk(chain.context);
  const int64_t room =
      options_.disk_blocks - options_.disk_blocks / kUnpinnedOnDisk - pinned_disk_blocks();
  PinnedBlocks pinned = {.granted =
                             std::max<int64_t>(0, std::min({chain.num_blocks(), most, room}))};
  if (!options_.persists()) pinned.granted = 0;
  std::vector<PrefixHash> hashes = HashesOf(chain, pinned.granted);
  for (const PrefixHash& hash : hashes) {
    if (restores_.HeldByAll(hash)) ++pinned.present;
    if (++disk_counts_[hash] == 1) new_pins_.push_back(hash);
  }
  Write(chain, Match(chain), pinned.granted);
  if (!hashes.empty()) disk_[chain.context] = std::move(hashes);
  return pinned;
}

void ContextBlocks::UnpinDisk(int64_t context) {
  const auto pin = disk_.extract(context);
  if (pin.empty()) return;
  for (const PrefixHash& hash : pin.mapped()) {
    const auto count = disk_counts_.find(hash);
    if (--count->second > 0) continue;
    disk_counts_.erase(count);
    std::erase(new_pins_, hash);
    ended_pins_.push_back(hash);
  }
}

void ContextBlocks::Write(const ContextChain& chain, const kvstore::PrefixMatch& match,
                          int64_t count) {
  if (!options_.persists()) return;
  for (int64_t i = 0; i < std::min(count, std::ssize(match.blocks)); ++i) {
    const auto index = static_cast<size_t>(i);
    if (restores_.HeldByAll(match.hashes[index])) continue;
    const auto begin = chain.tokens->begin() + i * kBlockTokens;
    writes_.push_back({.block = match.blocks[index], .tokens = {begin, begin + kBlockTokens}});
  }
}

int64_t ContextBlocks::CountInMemory(const ContextChain& chain) const {
  return std::ssize(Match(chain).blocks);
}

int64_t ContextBlocks::Demote(const ContextChain& chain) {
  const kvstore::PrefixMatch match = Match(chain);
  const int64_t count = std::ssize(match.blocks);
  Write(chain, match, count);
  for (const Block& block : match.blocks) demoted_.push_back(block.id());
  return count;
}

int64_t ContextBlocks::pinned_host_blocks() const {
  int64_t blocks = 0;
  for (const auto& [context, pinned] : host_) blocks += std::ssize(pinned);
  return blocks;
}

std::vector<kvstore::BlockId> ContextBlocks::held() const {
  std::vector<kvstore::BlockId> ids;
  for (const auto& [context, pinned] : host_) {
    for (const Block& block : pinned) ids.push_back(block.id());
  }
  for (const DiskWrite& write : writes_) ids.push_back(write.block.id());
  return ids;
}

// --- erasing ------------------------------------------------------------------------------------

void ContextBlocks::Erase(const EraseTarget& target, OnErased done) {
  v1::Erase erase;
  erase.set_id(++next_erase_);
  writes_.clear();  // of whomever: it is as if the disk had been busy
  if (target.chain != nullptr) {
    const ContextChain& chain = *target.chain;
    UnpinHost(chain.context);
    UnpinDisk(chain.context);
    const kvstore::PrefixMatch match = Match(chain);
    if (!match.blocks.empty()) index_.Lost(match.blocks.front().id());
    v1::PrefixHashes& blocks = *erase.mutable_blocks();
    for (const PrefixHash& hash : HashesOf(chain, chain.num_blocks())) {
      blocks.add_prefix_hash(BytesOf(hash));
    }
  } else if (target.tenant != nullptr) {
    const PrefixHash owner = kvstore::HashOwner(*target.tenant);
    index_.LoseOwned(&owner);
    erase.set_owner(BytesOf(owner));
  } else {
    index_.LoseOwned(nullptr);
    erase.set_all(true);
  }
  pending_[erase.id()] = {.ranks_left = options_.num_ranks, .sums = {}, .done = std::move(done)};
  erases_.push_back(std::move(erase));
}

void ContextBlocks::OnErasedBy(const v1::Erased& erased) {
  const auto it = pending_.find(erased.id());
  if (it == pending_.end()) return;
  v1::Erased& sums = it->second.sums;
  // A block is one on all ranks; its bytes are theirs together.
  sums.set_host_blocks(std::max(sums.host_blocks(), erased.host_blocks()));
  sums.set_disk_blocks(std::max(sums.disk_blocks(), erased.disk_blocks()));
  sums.set_blocks_in_use(std::max(sums.blocks_in_use(), erased.blocks_in_use()));
  sums.set_host_bytes(sums.host_bytes() + erased.host_bytes());
  sums.set_disk_bytes(sums.disk_bytes() + erased.disk_bytes());
  if (erased.error_code() != 0) {
    sums.set_error_code(erased.error_code());
    sums.set_error_message(erased.error_message());
  }
  if (--it->second.ranks_left > 0) return;
  const PendingErase ended = std::move(pending_.extract(it).mapped());
  if (ended.sums.error_code() == 0) return ended.done(ended.sums);
  ended.done(absl::Status(static_cast<absl::StatusCode>(ended.sums.error_code()),
                          ended.sums.error_message()));
}

// --- plans --------------------------------------------------------------------------------------

bool ContextBlocks::has_wishes() const {
  return !wishes_.empty() || !writes_.empty() || !demoted_.empty() || !new_pins_.empty() ||
         !ended_pins_.empty() || !erases_.empty();
}

void ContextBlocks::AddTo(PlanBuilder& plan) {
  for (const auto& wish : std::exchange(wishes_, {})) wish(absl::OkStatus());
  for (const DiskWrite& write : writes_) plan.AddPersist(write.block.id(), write.tokens);
  writes_.clear();
  for (const PrefixHash& hash : std::exchange(ended_pins_, {})) plan.AddDiskUnpin(hash);
  for (const PrefixHash& hash : std::exchange(new_pins_, {})) plan.AddDiskPin(hash);
  std::reverse(demoted_.begin(), demoted_.end());
  for (const kvstore::BlockId id : std::exchange(demoted_, {})) index_.EvictIdle(id);
  for (v1::Erase& erase : std::exchange(erases_, {})) plan.AddErase(std::move(erase));
}

void ContextBlocks::GiveUp() {
  host_.clear();
  disk_.clear();
  disk_counts_.clear();
  writes_.clear();
  demoted_.clear();
  new_pins_.clear();
  ended_pins_.clear();
  erases_.clear();
  const absl::Status lost =
      absl::UnavailableError("the worker group was lost meanwhile; ask again");
  for (const auto& wish : std::exchange(wishes_, {})) wish(lost);
  for (auto& [id, erase] : std::exchange(pending_, {})) erase.done(lost);
}

}  // namespace kvasir::coordinator
