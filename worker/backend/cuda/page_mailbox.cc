#include "worker/backend/cuda/page_mailbox.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::AskedPage;
using kernels::kMailboxBuffers;
using kernels::MailboxFlags;
using kernels::MailboxView;
using kernels::PinnedBuffer;

namespace {

using Clock = std::chrono::steady_clock;

// After a request the next layer's may come at once. Later, a look now and then is enough: a page
// takes longer to come from disk.
constexpr std::chrono::microseconds kEagerTime{500};
constexpr std::chrono::microseconds kLookInterval{20};

template <typename T>
T Look(T& flag) {
  return std::atomic_ref<T>(flag).load(std::memory_order_acquire);
}

int64_t RoundUp(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageMailbox>> PageMailbox::Create(int64_t page_bytes,
                                                                 int64_t most_pages) {
  const int64_t flags = RoundUp(sizeof(MailboxFlags));
  const int64_t asked = RoundUp(most_pages * static_cast<int64_t>(sizeof(AskedPage)));
  KVASIR_ASSIGN_OR_RETURN(PinnedBuffer memory,
                          PinnedBuffer::Allocate(flags + asked + kMailboxBuffers * page_bytes));
  std::byte* const begin = memory.data();
  std::memset(begin, 0, static_cast<size_t>(flags));
  const MailboxView view = {.flags = memory.As<MailboxFlags>(),
                            .asked = reinterpret_cast<AskedPage*>(begin + flags),
                            .buffers = begin + flags + asked};
  return std::unique_ptr<PageMailbox>(new PageMailbox(page_bytes, std::move(memory), view));
}

PageMailbox::PageMailbox(int64_t page_bytes, PinnedBuffer memory, const MailboxView& view)
    : page_bytes_(page_bytes),
      memory_(std::move(memory)),
      view_(view),
      thread_([this] { Run(); }) {}

PageMailbox::~PageMailbox() { Stop(); }

void PageMailbox::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void PageMailbox::Run() {
  while (AwaitRequest()) Serve();
}

bool PageMailbox::AwaitRequest() {
  const Clock::time_point eager_until = Clock::now() + kEagerTime;
  while (!stop_) {
    const uint32_t request = Look(view_.flags->request);
    if (request != served_ && TakeList(request)) return true;
    if (Clock::now() > eager_until) std::this_thread::sleep_for(kLookInterval);
  }
  return false;
}

bool PageMailbox::TakeList(uint32_t request) {
  const auto num_pages = static_cast<size_t>(view_.flags->num_pages);
  layer_ = view_.flags->layer;
  first_ticket_ = view_.flags->first_ticket;
  pages_.clear();
  slots_.clear();
  for (const AskedPage& asked : std::span(view_.asked, num_pages)) {
    pages_.push_back(asked.page);
    slots_.push_back(asked.slot);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (Look(view_.flags->begun) != request) return false;
  served_ = request;
  return true;
}

void PageMailbox::Serve() {
  kernels::AbsentPages* const source = source_.load();
  source->Want(layer_, pages_);
  for (size_t i = 0; i < pages_.size(); ++i) {
    const uint64_t ticket = first_ticket_ + i;
    if (!AwaitBuffer(ticket)) return;
    const auto buffer = static_cast<int64_t>(ticket % kMailboxBuffers);
    const bool came =
        source->Copy(slots_[i], pages_[i],
                     {view_.buffers + buffer * page_bytes_, static_cast<size_t>(page_bytes_)});
    std::atomic_ref<uint64_t>(view_.flags->arrived[buffer])
        .store(2 * (ticket + 1) + (came ? 1 : 0), std::memory_order_release);
  }
}

bool PageMailbox::IsAwaited() const { return !stop_ && Look(view_.flags->begun) == served_; }

bool PageMailbox::AwaitBuffer(uint64_t ticket) const {
  uint64_t& taken = view_.flags->taken[ticket % kMailboxBuffers];
  while (ticket >= kMailboxBuffers && Look(taken) < ticket + 1 - kMailboxBuffers) {
    if (!IsAwaited()) return false;
  }
  return IsAwaited();
}

}  // namespace kvasir::worker
