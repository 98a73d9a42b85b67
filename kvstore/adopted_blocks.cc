#include "kvstore/adopted_blocks.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

using kernels::MutexLock;

AdoptedBlocks::AdoptedBlocks(const ExtentFormat& format, const HostMemory& memory, HostSlab& host)
    : format_(format),
      host_(host),
      verifier_("verify", [this](const Adopted& adopted) { Verify(adopted); }) {
  host_.TakeWhere([&](int64_t extent) {
    if (!memory.WasTouched(extent)) return false;
    host_.MarkStale(extent);
    if (!ExtentFormat::HasHeader(host_.extent(extent))) return false;
    if (Adopt(extent)) {
      ++stats_.found;
      return true;
    }
    ExtentFormat::RemoveHeader(host_.extent(extent));
    return false;
  });
}

bool AdoptedBlocks::Adopt(int64_t extent) {
  const absl::StatusOr<BlockIdentity> block = format_.ReadHeader(host_.extent(extent));
  if (!block.ok()) {
    ++stats_.torn;
    return false;
  }
  next_generation_ = std::max(next_generation_, block->generation + 1);
  if (by_hash_.contains(block->hash)) return false;  // one of two equal blocks is enough
  by_generation_.emplace(block->generation, block->hash);
  by_hash_[block->hash] = {.extent = extent, .block = *block};
  return true;
}

std::vector<StoredBlock> AdoptedBlocks::Inventory() const {
  std::vector<StoredBlock> blocks;
  for (const auto& [hash, adopted] : by_hash_) {
    blocks.push_back({.hash = hash, .tokens = adopted.block.tokens});
  }
  return blocks;
}

AdoptedBlocks::Adopted AdoptedBlocks::Remove(const PrefixHash& hash) {
  const auto it = by_hash_.find(hash);
  KVASIR_CHECK(it != by_hash_.end());
  Adopted adopted = std::move(it->second);
  by_hash_.erase(it);
  by_generation_.erase({adopted.block.generation, hash});
  return adopted;
}

std::optional<PrefixHash> AdoptedBlocks::EvictOne() {
  if (by_generation_.empty()) return std::nullopt;
  const PrefixHash hash = by_generation_.begin()->second;
  host_.Free(Remove(hash).extent);
  ++stats_.evicted;
  return hash;
}

bool AdoptedBlocks::Drop(const PrefixHash& hash) {
  if (!Holds(hash)) return false;
  host_.Free(Remove(hash).extent);
  return true;
}

std::vector<PrefixHash> AdoptedBlocks::DropCovered(const TierErase& order) {
  std::vector<PrefixHash> covered;
  for (const auto& [hash, adopted] : by_hash_) {
    if (order.Covers(adopted.block)) covered.push_back(hash);
  }
  for (const PrefixHash& hash : covered) Drop(hash);
  return covered;
}

std::optional<BlockIdentity> AdoptedBlocks::TakeBack(int64_t extent) {
  const absl::StatusOr<BlockIdentity> block = format_.ReadHeader(host_.extent(extent));
  if (!block.ok() || !Adopt(extent)) {
    host_.Free(extent);
    return std::nullopt;
  }
  return *block;
}

int64_t AdoptedBlocks::BeginVerify(const PrefixHash& hash) {
  Adopted adopted = Remove(hash);
  const int64_t extent = adopted.extent;
  ++num_verifying_;
  verifier_.Add(std::move(adopted));
  return extent;
}

void AdoptedBlocks::Verify(const Adopted& adopted) {
  const absl::Status status = format_.Verify(adopted.block, host_.extent(adopted.extent));
  MutexLock lock(mu_);
  verified_.push_back({.extent = adopted.extent, .block = adopted.block, .status = status});
  changed_.NotifyAll();
}

std::vector<AdoptedBlocks::Verified> AdoptedBlocks::TakeVerified() {
  std::vector<Verified> verified;
  {
    MutexLock lock(mu_);
    verified = std::exchange(verified_, {});
  }
  num_verifying_ -= std::ssize(verified);
  for (const Verified& block : verified) stats_.damaged += block.status.ok() ? 0 : 1;
  return verified;
}

void AdoptedBlocks::AwaitVerified() {
  MutexLock lock(mu_);
  while (std::ssize(verified_) < num_verifying_) changed_.Wait(mu_);
}

}  // namespace kvasir::kvstore
