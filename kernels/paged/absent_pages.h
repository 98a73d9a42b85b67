// Pages that lie on disk only: absent in the page table, and brought into memory when they are
// read. On the CPU the table stays as it is for the whole step, and the kernel that finds a page
// absent asks here. For a GPU's kernels a thread asks (worker/backend/cuda/page_mailbox.h). Which
// pages memory has room for is the store's business (kvstore/on_demand/). Thread-safe, except Want.
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
  // Copies the page to `to`, for who uses no page in place. Otherwise like Bring; false when it
  // cannot be read. Also while other functions of the pages' owner run.
  virtual bool Copy(int64_t slot, int64_t page, std::span<std::byte> to) = 0;
  // Starts to bring pages that will be read soon, in about this order, for one layer. Between ops:
  // no page of an earlier Bring is in use.
  virtual void Want(int64_t layer, std::span<const int64_t> pages) = 0;
};

}  // namespace kvasir::kernels
