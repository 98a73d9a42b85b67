#include "kvstore/tiers/extent_table.h"

#include <utility>

namespace kvasir::kvstore {
namespace {

ManifestRecord Record(const BlockIdentity& block, Place place, uint64_t last_use) {
  return {.block = block, .segment = place.segment, .offset = place.offset, .last_use = last_use};
}

}  // namespace

void ExtentTable::Add(const ManifestRecord& record) {
  Entry& entry = entries_[record.block.hash];
  entry.extent = {.block = record.block,
                  .place = {.segment = record.segment, .offset = record.offset}};
  entry.last_use = record.last_use;
  std::list<PrefixHash>& order = OrderOf(record.block.hash);
  entry.lru = order.insert(order.end(), record.block.hash);
}

std::optional<ExtentTable::Removal> ExtentTable::Remove(const PrefixHash& hash) {
  const auto it = entries_.find(hash);
  if (it == entries_.end()) return std::nullopt;
  const Removal removal = {.hash = hash, .place = it->second.extent.place};
  OrderOf(hash).erase(it->second.lru);
  entries_.erase(it);
  return removal;
}

std::vector<StoredBlock> ExtentTable::Inventory() const {
  std::vector<StoredBlock> blocks;
  blocks.reserve(entries_.size());
  for (const auto& [hash, entry] : entries_) {
    blocks.push_back({.hash = hash, .tokens = entry.extent.block.tokens});
  }
  return blocks;
}

ManifestRecord ExtentTable::NewRecord(const BlockIdentity& block, Place place) {
  return Record(block, place, next_use_++);
}

bool ExtentTable::Touch(const PrefixHash& hash) {
  const auto it = entries_.find(hash);
  if (it == entries_.end()) return false;
  Entry& entry = it->second;
  entry.last_use = next_use_++;
  if (!std::exchange(entry.touched, true)) touched_.push_back(hash);
  std::list<PrefixHash>& order = OrderOf(hash);
  order.splice(order.end(), order, entry.lru);
  return true;
}

std::vector<ManifestRecord> ExtentTable::TakeTouched() {
  std::vector<ManifestRecord> records;
  for (const PrefixHash& hash : std::exchange(touched_, {})) {
    const auto it = entries_.find(hash);
    if (it == entries_.end() || !std::exchange(it->second.touched, false)) continue;
    const Extent& extent = it->second.extent;
    records.push_back(Record(extent.block, extent.place, it->second.last_use));
  }
  return records;
}

std::optional<ExtentTable::Extent> ExtentTable::BeginRead(const PrefixHash& hash) {
  const auto it = entries_.find(hash);
  if (it == entries_.end()) return std::nullopt;
  ++it->second.readers;
  return it->second.extent;
}

bool ExtentTable::EndRead(const BlockIdentity& block) {
  const auto it = entries_.find(block.hash);
  if (it == entries_.end() || it->second.extent.block.generation != block.generation) return false;
  --it->second.readers;
  return true;
}

void ExtentTable::Pin(const PrefixHash& hash) {
  if (!pins_.insert(hash).second) return;
  const auto it = entries_.find(hash);
  if (it != entries_.end()) pinned_lru_.splice(pinned_lru_.end(), lru_, it->second.lru);
}

void ExtentTable::Unpin(const PrefixHash& hash) {
  if (pins_.erase(hash) == 0) return;
  const auto it = entries_.find(hash);
  if (it != entries_.end()) lru_.splice(lru_.end(), pinned_lru_, it->second.lru);
}

std::vector<ExtentTable::Extent> ExtentTable::Extents() const {
  std::vector<Extent> extents;
  extents.reserve(entries_.size());
  for (const auto& [hash, entry] : entries_) extents.push_back(entry.extent);
  return extents;
}

bool ExtentTable::HasReader(const PrefixHash& hash) const {
  const auto it = entries_.find(hash);
  return it != entries_.end() && it->second.readers > 0;
}

std::optional<ExtentTable::Extent> ExtentTable::Hold(const PrefixHash& hash) {
  const auto it = entries_.find(hash);
  if (it == entries_.end()) return std::nullopt;
  ++it->second.holders;
  return it->second.extent;
}

void ExtentTable::EndHold(const BlockIdentity& block) {
  const auto it = entries_.find(block.hash);
  if (it == entries_.end() || it->second.extent.block.generation != block.generation) return;
  --it->second.holders;
}

bool ExtentTable::IsHeld(const PrefixHash& hash) const {
  const auto it = entries_.find(hash);
  return it != entries_.end() && it->second.holders > 0;
}

std::vector<PrefixHash> ExtentTable::ToEvict(int64_t count) const {
  std::vector<PrefixHash> hashes;
  for (const PrefixHash& hash : lru_) {
    if (static_cast<int64_t>(hashes.size()) >= count) break;
    const Entry& entry = entries_.at(hash);
    if (entry.readers == 0 && entry.holders == 0) hashes.push_back(hash);
  }
  return hashes;
}

}  // namespace kvasir::kvstore
