#include "kvstore/index/prefix_index.h"

#include <algorithm>
#include <list>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

struct Record {
  BlockId id;
  // Number of groups of handles that share one Block. Each group is released once.
  int64_t handles = 0;
  // Set while the block is cached: its place in the tree of prefixes.
  bool cached = false;
  PrefixHash hash{};
  PrefixHash scope{};  // set in a first block, as the owner is
  PrefixHash owner{};
  Record* parent = nullptr;  // null for a first block
  std::array<int32_t, kBlockTokens> tokens{};
  std::vector<Record*> children;  // cached blocks that continue this one
  int64_t held_children = 0;
  // For a private block, the cached block that equals it and its whole prefix, or no id.
  BlockId twin;
  std::list<Record*>::iterator idle_position;  // valid while idle

  bool held() const { return handles > 0 || held_children > 0; }
};

class PrefixIndexImpl : public PrefixIndex, private BlockOwner {
 public:
  PrefixIndexImpl(int64_t capacity_blocks, BlockHasher hasher, BlockListener* listener)
      : capacity_(capacity_blocks), hasher_(std::move(hasher)), listener_(listener) {}
  ~PrefixIndexImpl() override {
    if (listener_ != nullptr) listener_->Cleared();
  }

  PrefixMatch Match(const PrefixHash& scope, absl::Span<const int32_t> tokens,
                    const DecodePart& decode) override;
  absl::StatusOr<Block> Allocate() override;
  int64_t available_blocks() const override { return capacity_ - held_; }
  bool Publish(const FullBlock& full) override;
  std::vector<BlockId> TakeDropped() override { return std::exchange(dropped_, {}); }
  bool EvictIdle(BlockId id) override;
  void LoseOwned(const PrefixHash* owner) override;
  void Lost(BlockId id) override;
  PrefixIndexStats stats() const override;
  absl::Status CheckIntegrity() const override;

 private:
  void Release(BlockId id) override;
  Block Hold(Record& record);
  // `record` became held, or stopped being held. So do those of its parents that nothing else
  // holds.
  void OnHeld(Record* record);
  void OnReleased(Record* record);
  void Evict(Record& victim);
  // Returns the cached block that `block` is or equals. Null when there is none.
  Record* Canonical(const Block& block);
  void LeaveParent(Record& record);
  void Uncache(Record& record);
  void Drop(Record& record);
  int64_t size() const { return static_cast<int64_t>(records_.size()); }
  absl::Status CheckRecord(const Record& record) const;
  absl::Status CheckIdleOrder() const;

  const int64_t capacity_;
  const BlockHasher hasher_;
  BlockListener* const listener_;
  int64_t next_id_ = 0;
  absl::node_hash_map<BlockId, Record> records_;  // every block that is not free
  absl::flat_hash_map<PrefixHash, Record*> cached_;
  std::list<Record*> idle_;  // least recently used first
  int64_t held_ = 0;
  int64_t evictions_ = 0;
  int64_t hash_collisions_ = 0;
  std::vector<BlockId> dropped_;
};

PrefixMatch PrefixIndexImpl::Match(const PrefixHash& scope, absl::Span<const int32_t> tokens,
                                   const DecodePart& decode) {
  PrefixMatch match;
  const int64_t limit = (static_cast<int64_t>(tokens.size()) - 1) / kBlockTokens;
  Record* before = nullptr;
  for (int64_t i = 0; i < limit; ++i) {
    const auto block_tokens =
        tokens.subspan(static_cast<size_t>(i * kBlockTokens), static_cast<size_t>(kBlockTokens));
    const PrefixHash hash =
        hasher_(match.hashes.empty() ? scope : match.hashes.back(), block_tokens, decode.KeyOf(i));
    const auto it = cached_.find(hash);
    if (it == cached_.end()) break;
    Record& record = *it->second;
    if (record.parent != before || (before == nullptr && record.scope != scope) ||
        block_tokens != absl::MakeConstSpan(record.tokens)) {
      ++hash_collisions_;
      break;
    }
    match.blocks.push_back(Hold(record));
    match.hashes.push_back(hash);
    before = &record;
  }
  return match;
}

absl::StatusOr<Block> PrefixIndexImpl::Allocate() {
  if (size() >= capacity_) {
    if (idle_.empty()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("need 1 block, ", held_, " of ", capacity_,
                       " are held; raise kv_host_size_gb or run fewer or shorter requests"));
    }
    Evict(*idle_.front());
  }
  const BlockId id(next_id_++);
  Record& record = records_[id];
  record.id = id;
  return Hold(record);
}

bool PrefixIndexImpl::Publish(const FullBlock& full) {
  KVASIR_CHECK(full.tokens.size() == static_cast<size_t>(kBlockTokens));
  Record& record = records_.at(full.block.id());
  if (record.cached) return true;
  Record* const parent = full.before ? Canonical(full.before) : nullptr;
  if (full.before && parent == nullptr) return false;
  if (const auto it = cached_.find(full.hash); it != cached_.end()) {
    const Record& other = *it->second;
    if (other.parent == parent && (parent != nullptr || other.scope == full.parent) &&
        full.tokens == absl::MakeConstSpan(other.tokens)) {
      record.twin = other.id;
    } else {
      ++hash_collisions_;
    }
    return false;
  }
  if (parent != nullptr && !parent->held()) return false;
  record.cached = true;
  record.hash = full.hash;
  record.scope = parent == nullptr ? full.parent : PrefixHash{};
  record.owner = parent == nullptr ? full.owner : PrefixHash{};
  record.parent = parent;
  std::copy(full.tokens.begin(), full.tokens.end(), record.tokens.begin());
  cached_[full.hash] = &record;
  if (parent != nullptr) {
    parent->children.push_back(&record);
    ++parent->held_children;
  }
  if (listener_ != nullptr) {
    listener_->Stored(full.hash, parent == nullptr ? nullptr : &full.parent, full.tokens);
  }
  return true;
}

void PrefixIndexImpl::Lost(BlockId id) {
  const auto it = records_.find(id);
  if (it == records_.end() || !it->second.cached) return;
  Record& top = it->second;
  LeaveParent(top);
  std::vector<Record*> subtree = {&top};
  for (size_t i = 0; i < subtree.size(); ++i) {
    const Record& record = *subtree[i];
    subtree.insert(subtree.end(), record.children.begin(), record.children.end());
  }
  for (Record* record : subtree) {
    const bool was_held = record->held();
    if (!was_held) idle_.erase(record->idle_position);
    Uncache(*record);
    if (record->handles > 0) continue;  // private to its holders from now on
    if (was_held) --held_;
    Drop(*record);
  }
}

bool PrefixIndexImpl::EvictIdle(BlockId id) {
  const auto it = records_.find(id);
  if (it == records_.end() || it->second.held() || !it->second.children.empty()) return false;
  Evict(it->second);
  return true;
}

void PrefixIndexImpl::LoseOwned(const PrefixHash* owner) {
  std::vector<BlockId> first;
  for (const auto& [id, record] : records_) {
    const bool is_first = record.cached && record.parent == nullptr;
    if (is_first && (owner == nullptr || record.owner == *owner)) first.push_back(id);
  }
  for (const BlockId id : first) Lost(id);
}

PrefixIndexStats PrefixIndexImpl::stats() const {
  return {.capacity_blocks = capacity_,
          .held_blocks = held_,
          .idle_blocks = static_cast<int64_t>(idle_.size()),
          .cached_blocks = static_cast<int64_t>(cached_.size()),
          .evictions = evictions_,
          .hash_collisions = hash_collisions_};
}

void PrefixIndexImpl::Release(BlockId id) {
  Record& record = records_.at(id);
  --record.handles;
  if (!record.held()) OnReleased(&record);
}

Block PrefixIndexImpl::Hold(Record& record) {
  const bool was_held = record.held();
  ++record.handles;
  if (!was_held) OnHeld(&record);
  return Block(record.id, *this);
}

void PrefixIndexImpl::OnHeld(Record* record) {
  for (;;) {
    ++held_;
    if (record->cached) idle_.erase(record->idle_position);
    Record* const parent = record->parent;
    if (parent == nullptr) return;
    const bool was_held = parent->held();
    ++parent->held_children;
    if (was_held) return;
    record = parent;
  }
}

void PrefixIndexImpl::OnReleased(Record* record) {
  for (;;) {
    --held_;
    if (!record->cached) {
      Drop(*record);
      return;
    }
    record->idle_position = idle_.insert(idle_.end(), record);
    Record* const parent = record->parent;
    if (parent == nullptr) return;
    --parent->held_children;
    if (parent->held()) return;
    record = parent;
  }
}

void PrefixIndexImpl::Evict(Record& victim) {
  KVASIR_CHECK(victim.children.empty());
  idle_.erase(victim.idle_position);
  LeaveParent(victim);
  Uncache(victim);
  Drop(victim);
  ++evictions_;
}

void PrefixIndexImpl::LeaveParent(Record& record) {
  Record* const parent = std::exchange(record.parent, nullptr);
  if (parent == nullptr) return;
  auto& siblings = parent->children;
  *std::find(siblings.begin(), siblings.end(), &record) = siblings.back();
  siblings.pop_back();
  if (!record.held()) return;
  --parent->held_children;
  if (!parent->held()) OnReleased(parent);
}

Record* PrefixIndexImpl::Canonical(const Block& block) {
  Record& record = records_.at(block.id());
  if (record.cached) return &record;
  const auto it = records_.find(record.twin);
  return it != records_.end() && it->second.cached ? &it->second : nullptr;
}

void PrefixIndexImpl::Uncache(Record& record) {
  cached_.erase(record.hash);
  if (listener_ != nullptr) listener_->Removed(record.hash);
  record.cached = false;
  record.parent = nullptr;
  record.children.clear();
  record.held_children = 0;
}

void PrefixIndexImpl::Drop(Record& record) {
  dropped_.push_back(record.id);
  records_.erase(record.id);
}

absl::Status PrefixIndexImpl::CheckIntegrity() const {
  int64_t held = 0;
  int64_t cached = 0;
  for (const auto& [id, record] : records_) {
    KVASIR_RETURN_IF_ERROR(CheckRecord(record));
    held += record.held() ? 1 : 0;
    cached += record.cached ? 1 : 0;
  }
  const int64_t idle = static_cast<int64_t>(idle_.size());
  if (held != held_ || held + idle != size() || size() > capacity_ ||
      cached != static_cast<int64_t>(cached_.size())) {
    return absl::InternalError(absl::StrCat(
        "prefix index: ", size(), " blocks of ", capacity_, ", held ", held, " (counted ", held_,
        "), idle ", idle, ", cached ", cached, " (findable ", cached_.size(), ")"));
  }
  return CheckIdleOrder();
}

absl::Status PrefixIndexImpl::CheckRecord(const Record& record) const {
  const auto broken = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("prefix index: block ", record.id.value, " ", what));
  };
  int64_t held_children = 0;
  for (const Record* child : record.children) {
    if (child->parent != &record || !child->cached) return broken("has a child that left it");
    held_children += child->held() ? 1 : 0;
  }
  if (held_children != record.held_children) return broken("miscounts held children");
  if (!record.cached) {
    if (record.handles == 0) return broken("is private and not held");
    if (record.parent != nullptr || !record.children.empty()) return broken("is private in a tree");
    return absl::OkStatus();
  }
  const auto it = cached_.find(record.hash);
  if (it == cached_.end() || it->second != &record) return broken("is cached but cannot be found");
  if (record.parent != nullptr &&
      std::find(record.parent->children.begin(), record.parent->children.end(), &record) ==
          record.parent->children.end()) {
    return broken("is unknown to its parent");
  }
  return absl::OkStatus();
}

absl::Status PrefixIndexImpl::CheckIdleOrder() const {
  absl::flat_hash_map<const Record*, int64_t> position;
  for (const Record* record : idle_) {
    if (record->held() || !record->cached) {
      return absl::InternalError(
          absl::StrCat("prefix index: block ", record->id.value, " is in the idle list but held"));
    }
    position[record] = static_cast<int64_t>(position.size());
  }
  for (const auto& [record, place] : position) {
    const auto parent = position.find(record->parent);
    if (parent != position.end() && parent->second < place) {
      return absl::InternalError(absl::StrCat("prefix index: block ", record->id.value,
                                              " would be evicted after its parent"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<PrefixIndex> PrefixIndex::Create(int64_t capacity_blocks, BlockHasher hasher,
                                                 BlockListener* listener) {
  return std::make_unique<PrefixIndexImpl>(capacity_blocks, std::move(hasher), listener);
}

}  // namespace kvasir::kvstore
