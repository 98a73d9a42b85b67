#include "kvstore/peers/lent_blocks.h"

namespace kvasir::kvstore {

using kernels::MutexLock;

void LentBlocks::Add(const PrefixHash& hash, absl::Span<const std::byte> extent) {
  MutexLock lock(mu_);
  while (being_read_ == hash) read_ended_.Wait(mu_);
  by_hash_[hash] = {.extent = extent, .number = ++next_number_};
}

void LentBlocks::Remove(const PrefixHash& hash, absl::Span<const std::byte> extent) {
  MutexLock lock(mu_);
  while (being_read_ == hash) read_ended_.Wait(mu_);
  const auto it = by_hash_.find(hash);
  if (it != by_hash_.end() && it->second.extent.data() == extent.data()) by_hash_.erase(it);
}

std::optional<LentBlocks::Lent> LentBlocks::Find(const PrefixHash& hash) const {
  MutexLock lock(mu_);
  const auto it = by_hash_.find(hash);
  if (it == by_hash_.end()) return std::nullopt;
  return it->second;
}

bool LentBlocks::Read(const PrefixHash& hash,
                      absl::FunctionRef<void(absl::Span<const std::byte>)> read) {
  absl::Span<const std::byte> extent;
  {
    MutexLock lock(mu_);
    const auto it = by_hash_.find(hash);
    if (it == by_hash_.end()) return false;
    extent = it->second.extent;
    being_read_ = hash;
  }
  read(extent);
  MutexLock lock(mu_);
  being_read_.reset();
  read_ended_.NotifyAll();
  return true;
}

bool LentBlocks::IsStillLent(const PrefixHash& hash, uint64_t number) const {
  MutexLock lock(mu_);
  const auto it = by_hash_.find(hash);
  return it != by_hash_.end() && it->second.number == number;
}

}  // namespace kvasir::kvstore
