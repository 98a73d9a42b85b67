// Memory for as few pages as a page cache must have for one thread: a page that was brought is
// overwritten as soon as AbsentPages allows. For tests that a kernel uses no page longer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/paged/absent_pages.h"
#include "tests/support/fake_paged_kv.h"

namespace kvasir::kernels {

class FewFrames final : public AbsentPages {
 public:
  // All pages of `kv`, which outlives this object, are absent from now on and come from here.
  explicit FewFrames(FakePagedKv& kv) : kv_(kv) {
    for (const int64_t in_use : kPagesInUse) {
      Ring& ring = rings_.emplace_back();
      for (int64_t i = 0; i < in_use; ++i) {
        ring.frames.push_back(HostBuffer::Allocate(kv.layout().page_bytes()).value());
      }
    }
    kv.MoveTo(*this);
  }

  std::byte* Bring(int64_t, int64_t page, PageUse use) override {
    Ring& ring = rings_[static_cast<size_t>(use)];
    const size_t next = static_cast<size_t>(ring.brought++) % ring.frames.size();
    std::byte* const frame = ring.frames[next].data();
    std::memcpy(frame, kv_.memory(page), static_cast<size_t>(kv_.layout().page_bytes()));
    return frame;
  }
  bool Copy(int64_t, int64_t page, std::span<std::byte> to) override {
    std::memcpy(to.data(), kv_.memory(page), to.size());
    return true;
  }
  void Want(int64_t, std::span<const int64_t>) override {}

  // Pages that left since the start, so that others could come.
  int64_t num_left(PageUse use) const {
    const Ring& ring = rings_[static_cast<size_t>(use)];
    return std::max<int64_t>(0, ring.brought - std::ssize(ring.frames));
  }

 private:
  struct Ring {
    std::vector<HostBuffer> frames;
    int64_t brought = 0;
  };

  FakePagedKv& kv_;
  std::vector<Ring> rings_;  // [PageUse]
};

}  // namespace kvasir::kernels
