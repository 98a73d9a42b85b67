// The host's side of the fault mailbox (kernels/residency/bring_pages_cuda.h): pinned memory, and a
// thread that looks at the bell and puts the pages that the device asks for into buffers. It calls
// nothing of the driver. Only in builds with CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/paged/absent_pages.h"
#include "kernels/residency/bring_pages_cuda.h"

namespace kvasir::worker {

class PageMailbox {
 public:
  // A request names at most `most_pages`. RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<std::unique_ptr<PageMailbox>> Create(int64_t page_bytes,
                                                             int64_t most_pages);
  ~PageMailbox();

  const kernels::MailboxView& view() const { return view_; }
  // Pages come from here. It outlives the steps that begin after the call.
  void ServeFrom(kernels::AbsentPages& pages) { source_.store(&pages); }

 private:
  PageMailbox(int64_t page_bytes, kernels::PinnedBuffer memory, const kernels::MailboxView& view);

  void Run();
  // Waits for the bell. Returns whether a request has come; false: stop.
  bool AwaitRequest();
  void Serve();
  // Waits until the device has taken what the buffer had before. False: stop.
  bool AwaitBuffer(uint64_t ticket);

  const int64_t page_bytes_;
  const kernels::PinnedBuffer memory_;
  const kernels::MailboxView view_;
  std::atomic<kernels::AbsentPages*> source_ = nullptr;
  std::atomic<bool> stop_ = false;
  uint32_t served_ = 0;  // requests
  uint64_t ticket_ = 0;  // of the next page
  std::vector<int64_t> wanted_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace kvasir::worker
