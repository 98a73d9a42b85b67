// A model of PrefixIndex that is as simple as can be, to compare it with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/kvstore/index/letter_prefixes.h"

namespace kvasir::kvstore {

// The index written again in the simplest way: prefixes are strings of letters, and the held blocks
// are computed again after each operation.
class NaiveIndex {
 public:
  NaiveIndex(int64_t capacity, BlockHasher hasher) : capacity_(capacity), hasher_(hasher) {}

  struct Entry {
    std::string prefix;  // empty while not full
    bool cached = false;
    int64_t handles = 0;
    int64_t idle_since = -1;
    int64_t twin = -1;  // the cached block it equalled when it was full
  };

  std::vector<int64_t> Match(const std::string& letters, size_t limit) {
    std::vector<int64_t> ids;
    for (size_t n = 1; n <= limit; ++n) {
      const auto id = FindCached(letters.substr(0, n));
      if (!id.has_value()) break;
      ids.push_back(*id);
    }
    for (int64_t id : ids) ++entries_[id].handles;
    Settle();
    return ids;
  }
  bool CanAllocate() const { return Available() > 0; }
  void Allocate(int64_t id) {
    if (static_cast<int64_t>(entries_.size()) == capacity_) {
      auto victim = entries_.end();
      for (auto it = entries_.begin(); it != entries_.end(); ++it) {
        if (it->second.idle_since < 0) continue;
        if (victim == entries_.end() || it->second.idle_since < victim->second.idle_since) {
          victim = it;
        }
      }
      dropped_.insert(victim->first);
      entries_.erase(victim);
    }
    entries_[id].handles = 1;
  }
  bool Publish(int64_t id, std::optional<int64_t> before, const std::string& prefix) {
    const Entry* parent = nullptr;
    if (before.has_value()) {
      parent = &entries_.at(*before);
      if (!parent->cached) {
        if (!entries_.contains(parent->twin)) return false;
        parent = &entries_.at(parent->twin);
      }
      if (!parent->cached) return false;
    }
    entries_[id].prefix = prefix;
    const PrefixHash hash = HashOf(Scope(), prefix, hasher_);
    for (const auto& [other, entry] : entries_) {
      if (!entry.cached || HashOf(Scope(), entry.prefix, hasher_) != hash) continue;
      if (entry.prefix == prefix) entries_[id].twin = other;
      return false;
    }
    if (parent != nullptr && !IsHeld(*parent)) return false;
    entries_[id].cached = true;
    return true;
  }
  void Release(int64_t id) {
    --entries_[id].handles;
    Settle();
  }
  void Lost(int64_t id) {
    const auto it = entries_.find(id);
    if (it == entries_.end() || !it->second.cached) return;
    const std::string top = it->second.prefix;
    for (auto& [other, entry] : entries_) {
      if (entry.cached && entry.prefix.substr(0, top.size()) == top) entry.cached = false;
    }
    Settle();
  }
  int64_t Available() const {
    int64_t held = 0;
    for (const auto& [id, entry] : entries_) held += IsHeld(entry) ? 1 : 0;
    return capacity_ - held;
  }
  std::set<int64_t> TakeDropped() { return std::exchange(dropped_, {}); }
  std::vector<int64_t> Ids() const {
    std::vector<int64_t> ids;
    for (const auto& [id, entry] : entries_) ids.push_back(id);
    return ids;
  }

 private:
  std::optional<int64_t> FindCached(const std::string& prefix) const {
    for (const auto& [id, entry] : entries_) {
      if (entry.cached && entry.prefix == prefix) return id;
    }
    return std::nullopt;
  }
  bool IsHeld(const Entry& entry) const {
    if (entry.handles > 0) return true;
    if (!entry.cached) return false;
    for (const auto& [id, other] : entries_) {
      if (other.cached && other.handles > 0 && other.prefix.size() > entry.prefix.size() &&
          other.prefix.substr(0, entry.prefix.size()) == entry.prefix) {
        return true;
      }
    }
    return false;
  }
  // Drops private blocks without holders, and gives ages to newly idle blocks, the longest prefix
  // first.
  void Settle() {
    std::vector<std::pair<size_t, int64_t>> newly_idle;
    for (auto it = entries_.begin(); it != entries_.end();) {
      Entry& entry = it->second;
      if (entry.handles == 0 && !entry.cached) {
        dropped_.insert(it->first);
        it = entries_.erase(it);
        continue;
      }
      if (IsHeld(entry)) {
        entry.idle_since = -1;
      } else if (entry.idle_since < 0) {
        newly_idle.emplace_back(entry.prefix.size(), it->first);
      }
      ++it;
    }
    std::sort(newly_idle.rbegin(), newly_idle.rend());
    for (const auto& [length, id] : newly_idle) entries_[id].idle_since = clock_++;
  }

  const int64_t capacity_;
  const BlockHasher hasher_;
  std::map<int64_t, Entry> entries_;
  std::set<int64_t> dropped_;
  int64_t clock_ = 0;
};

}  // namespace kvasir::kvstore
