#include "kvstore/heads/head_stores.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

class HeldByHeads : public HeldExtent {
 public:
  explicit HeldByHeads(std::vector<std::unique_ptr<HeldExtent>> heads) : heads_(std::move(heads)) {}
  Place Find(int64_t page_in_block) const override {
    const auto num_heads = std::ssize(heads_);
    return heads_[static_cast<size_t>(page_in_block % num_heads)]->Find(page_in_block / num_heads);
  }
  bool IsOfSealing(uint64_t generation) const override {
    return std::all_of(heads_.begin(), heads_.end(),
                       [&](const auto& head) { return head->IsOfSealing(generation); });
  }

 private:
  const std::vector<std::unique_ptr<HeldExtent>> heads_;
};

}  // namespace

HeadStores::HeadStores(const ExtentFormat& format, std::vector<std::unique_ptr<Tier>> heads)
    : format_(format), heads_(std::move(heads)), in_flight_(heads_.size()) {
  KVASIR_CHECK(!heads_.empty());
}

void HeadStores::Write(std::vector<TierWrite> writes) {
  for (const TierWrite& write : writes) requests_[write.ticket] = {.left = heads_.size()};
  for (size_t i = 0; i < heads_.size(); ++i) {
    in_flight_[i] += std::ssize(writes);
    heads_[i]->Write(writes);
  }
}

void HeadStores::Read(std::vector<TierRead> reads) {
  for (const TierRead& read : reads) {
    requests_[read.ticket] = {.left = heads_.size(), .read = read.extent};
  }
  for (size_t i = 0; i < heads_.size(); ++i) {
    in_flight_[i] += std::ssize(reads);
    heads_[i]->Read(reads);
  }
}

void HeadStores::Pin(absl::Span<const PrefixHash> blocks) {
  for (const auto& head : heads_) head->Pin(blocks);
}

void HeadStores::Unpin(absl::Span<const PrefixHash> blocks) {
  for (const auto& head : heads_) head->Unpin(blocks);
}

bool HeadStores::Erase(TierErase erase) {
  erasing_[erase.ticket] = {.left = heads_.size(), .sums = {.ticket = erase.ticket, .status = {}}};
  for (size_t i = 0; i < heads_.size(); ++i) {
    ++in_flight_[i];
    KVASIR_CHECK(heads_[i]->Erase(erase));
  }
  return true;
}

void HeadStores::EndErase(size_t head, const TierErased& erased) {
  --in_flight_[head];
  Erasing& erasing = erasing_.at(erased.ticket);
  erasing.sums.status.Update(erased.status);
  erasing.sums.blocks = std::max(erasing.sums.blocks, erased.blocks);
  erasing.sums.bytes += erased.bytes;
  if (--erasing.left > 0) return;
  events_.erased.push_back(std::move(erasing.sums));
  erasing_.erase(erased.ticket);
}

void HeadStores::End(size_t head, TierCompletion completion) {
  --in_flight_[head];
  const auto it = requests_.find(completion.ticket);
  Request& request = it->second;
  request.status.Update(completion.status);
  if (head == 0) request.block = completion.block;
  if (--request.left > 0) return;
  // The heads' parts may be of different sealings: the header is that of this extent alone.
  if (request.status.ok() && !request.read.empty()) {
    format_.WriteHeader(request.block, request.read);
  }
  events_.completions.push_back(
      {.ticket = completion.ticket, .status = std::move(request.status), .block = request.block});
  requests_.erase(it);
}

void HeadStores::Collect() {
  for (size_t i = 0; i < heads_.size(); ++i) {
    TierEvents events = heads_[i]->Poll();
    for (TierCompletion& completion : events.completions) End(i, std::move(completion));
    for (const TierErased& erased : events.erased) EndErase(i, erased);
    std::move(events.forgotten.begin(), events.forgotten.end(),
              std::back_inserter(events_.forgotten));
  }
}

TierEvents HeadStores::Poll() {
  Collect();
  return std::exchange(events_, {});
}

void HeadStores::Wait() {
  for (;;) {
    Collect();
    const bool has_event = !events_.completions.empty() || !events_.forgotten.empty();
    if (has_event || !events_.erased.empty()) return;
    const auto busy =
        std::find_if(in_flight_.begin(), in_flight_.end(), [](int64_t count) { return count > 0; });
    if (busy == in_flight_.end()) return;
    heads_[static_cast<size_t>(busy - in_flight_.begin())]->Wait();
  }
}

bool HeadStores::Holds(const PrefixHash& hash) const {
  return std::all_of(heads_.begin(), heads_.end(),
                     [&](const auto& head) { return head->Holds(hash); });
}

std::unique_ptr<HeldExtent> HeadStores::Hold(const PrefixHash& hash) {
  std::vector<std::unique_ptr<HeldExtent>> held;
  for (const auto& head : heads_) {
    held.push_back(head->Hold(hash));
    if (held.back() == nullptr) return nullptr;
  }
  return std::make_unique<HeldByHeads>(std::move(held));
}

// The stores of all heads use files of one kind, so that one's queue serves all.
std::unique_ptr<IoQueue> HeadStores::NewReadQueue() {
  std::unique_ptr<IoQueue> queue;
  for (const auto& head : heads_) {
    queue = head->NewReadQueue();
    if (queue == nullptr) break;
  }
  return queue;
}

std::vector<StoredBlock> HeadStores::Inventory() const {
  std::vector<StoredBlock> blocks = heads_[0]->Inventory();
  std::erase_if(blocks, [&](const StoredBlock& block) { return !Holds(block.hash); });
  return blocks;
}

uint64_t HeadStores::first_generation() const {
  uint64_t first = 0;
  for (const auto& head : heads_) first = std::max(first, head->first_generation());
  return first;
}

TierStats HeadStores::stats() const {
  TierStats sum = heads_[0]->stats();
  for (size_t i = 1; i < heads_.size(); ++i) {
    const TierStats head = heads_[i]->stats();
    sum.capacity_blocks = std::min(sum.capacity_blocks, head.capacity_blocks);
    sum.blocks = std::min(sum.blocks, head.blocks);
    sum.writable = sum.writable && head.writable;
    sum.written_bytes += head.written_bytes;
    sum.read_bytes += head.read_bytes;
    sum.written_blocks = std::min(sum.written_blocks, head.written_blocks);
    sum.read_blocks = std::min(sum.read_blocks, head.read_blocks);
    // Heads are written and read beside each other.
    sum.write_seconds = std::max(sum.write_seconds, head.write_seconds);
    sum.read_seconds = std::max(sum.read_seconds, head.read_seconds);
    sum.refused_writes = std::max(sum.refused_writes, head.refused_writes);
    sum.failed_writes = std::max(sum.failed_writes, head.failed_writes);
    sum.evictions = std::max(sum.evictions, head.evictions);
    sum.failed_reads += head.failed_reads;
    sum.checksum_failures += head.checksum_failures;
  }
  return sum;
}

}  // namespace kvasir::kvstore
