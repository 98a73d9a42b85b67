#include "kvstore/on_demand/lean_blocks.h"

#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

absl::StatusOr<std::unique_ptr<LeanBlocks>> LeanBlocks::Create(const PageCache::Options& options,
                                                               Tier& below) {
  KVASIR_ASSIGN_OR_RETURN(
      ExtentMemory fronts,
      ExtentMemory::Allocate(options.num_blocks, options.format.pages_offset()));
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PageCache> cache, PageCache::Create(options, below));
  return std::unique_ptr<LeanBlocks>(new LeanBlocks(options, std::move(fronts), std::move(cache)));
}

LeanBlocks::LeanBlocks(const PageCache::Options& options, ExtentMemory fronts,
                       std::unique_ptr<PageCache> cache)
    : range_({.begin = options.first_extent, .count = options.num_blocks}),
      bounds_offset_(options.format.bounds_offset()),
      fronts_(std::move(fronts)),
      held_(static_cast<size_t>(options.num_blocks)),
      cache_(std::move(cache)) {
  for (int64_t i = range_.count; i-- > 0;) free_.push_back(range_.begin + i);
}

std::vector<std::byte*> LeanBlocks::all_bounds() const {
  std::vector<std::byte*> bounds;
  for (int64_t i = 0; i < range_.count; ++i) {
    bounds.push_back(front(range_.begin + i).data() + bounds_offset_);
  }
  return bounds;
}

int64_t LeanBlocks::Take(std::unique_ptr<HeldExtent> held) {
  KVASIR_CHECK(!free_.empty() && held != nullptr);
  const int64_t extent = free_.back();
  free_.pop_back();
  held_[static_cast<size_t>(extent - range_.begin)] = std::move(held);
  return extent;
}

void LeanBlocks::Show(int64_t extent, const PrefixHash& hash) {
  const int64_t block = extent - range_.begin;
  cache_->Add(block, hash, *held_[static_cast<size_t>(block)], front(extent).data());
}

void LeanBlocks::Free(int64_t extent) {
  const int64_t block = extent - range_.begin;
  cache_->Remove(block);
  std::memset(front(extent).data(), 0, front(extent).size());
  held_[static_cast<size_t>(block)].reset();
  free_.push_back(extent);
}

}  // namespace kvasir::kvstore
