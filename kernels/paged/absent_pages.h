// Pages that lie on disk only, as kernels on the CPU see them: absent in the page table, and
// brought into memory when they are read. The table stays as it is for the whole step; who finds a
// page absent asks here. Which pages memory has room for is the store's business
// (kvstore/on_demand/). Thread-safe, except Want.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvasir::kernels {

// How long a thread uses a page that it was given: until it was given this many others for the
// same use.
enum class PageUse : uint8_t {
  kAttend,  // one page after the other
  kSelect   // pages of two tiles of keys, which may all be different
};
inline constexpr int64_t kPagesInUse[] = {2, 2 * 64 + 2};

class AbsentPages {
 public:
  virtual ~AbsentPages() = default;
  // Returns the page, waiting for it; null when it cannot be read. `page` is its index in the page
  // table. Waits count for the sequence in `slot`.
  virtual std::byte* Bring(int64_t slot, int64_t page, PageUse use) = 0;
  // Starts to bring pages that will be read soon, in about this order, for one layer. Between ops:
  // no page of an earlier Bring is in use.
  virtual void Want(int64_t layer, std::span<const int64_t> pages) = 0;
};

}  // namespace kvasir::kernels
