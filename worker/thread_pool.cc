#include "worker/thread_pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvasir::worker {
namespace {

using Clock = std::chrono::steady_clock;

// Time for which a waiting thread spins before it sleeps. It is longer than the work of a step
// between two loops, since waking a thread takes as long as a small loop. A number of pauses would
// not do: one takes 40 cycles on some machines and 140 on others.
constexpr std::chrono::microseconds kSpinTime(100);
// Spins between two readings of the clock.
constexpr int kSpins = 32;
// A loop number has 32 bits, and so does an item number; longer loops are run in pieces.
constexpr int64_t kMaxItems = int64_t{1} << 31;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns once `value` is no longer `old`.
void WaitWhile(const std::atomic<uint32_t>& value, uint32_t old) {
  const Clock::time_point end = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      Pause();
    }
  } while (Clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads > 0
                       ? num_threads
                       : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))) {
  for (int t = 1; t < num_threads_; ++t) threads_.emplace_back([this, t] { RunThread(t); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  loop_.fetch_add(1, std::memory_order_release);
  loop_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) {
  if (n <= 1 || threads_.empty()) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  for (int64_t begin = 0; begin < n; begin += kMaxItems) {
    const uint32_t size = static_cast<uint32_t>(std::min(n - begin, kMaxItems));
    if (begin == 0) {
      RunLoop(size, body);
    } else {
      RunLoop(size, [&](int64_t i, int thread) { body(begin + i, thread); });
    }
  }
}

void ThreadPool::RunLoop(uint32_t size, const std::function<void(int64_t, int)>& body) {
  const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  Loop& slot = loops_[loop % 2];
  slot.body.store(&body, std::memory_order_relaxed);
  slot.size.store(size, std::memory_order_relaxed);
  unfinished_.store(size, std::memory_order_relaxed);
  next_.store(uint64_t{loop} << 32, std::memory_order_release);
  loop_.store(loop, std::memory_order_release);
  loop_.notify_all();
  TakeItems(loop, 0);
  for (uint32_t left = unfinished_.load(std::memory_order_acquire); left > 0;
       left = unfinished_.load(std::memory_order_acquire)) {
    WaitWhile(unfinished_, left);
  }
}

void ThreadPool::TakeItems(uint32_t loop, int thread) {
  Loop& slot = loops_[loop % 2];
  uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    // Belongs to loop `loop` for certain only if the exchange below succeeds: the slot is written
    // again after `next_` has left this loop.
    const auto* body = slot.body.load(std::memory_order_relaxed);
    const uint32_t size = slot.size.load(std::memory_order_relaxed);
    const uint32_t item = static_cast<uint32_t>(next);
    if (next >> 32 != loop || item >= size) return;
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
    (*body)(item, thread);
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    next = next_.load(std::memory_order_acquire);
  }
}

void ThreadPool::RunThread(int thread) {
  uint32_t seen = 0;
  for (;;) {
    WaitWhile(loop_, seen);
    seen = loop_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    TakeItems(seen, thread);
  }
}

}  // namespace kvasir::worker
