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
  // Nobody asks for pages any more. Waits for the page that is being copied.
  void Stop();

  const kernels::MailboxView& view() const { return view_; }
  // Pages come from here, until Stop.
  void ServeFrom(kernels::AbsentPages& pages) { source_.store(&pages); }

 private:
  PageMailbox(int64_t page_bytes, kernels::PinnedBuffer memory, const kernels::MailboxView& view);

  void Run();
  // Waits for the bell. Returns whether a request has come; false: stop.
  bool AwaitRequest();
  // Copies the list of the newest request. False when the device writes another one meanwhile.
  bool TakeList(uint32_t request);
  void Serve();
  // Whether the device waits for the request that is being served.
  bool IsAwaited() const;
  // Waits until the device has taken what the buffer had before. False: there is no need.
  bool AwaitBuffer(uint64_t ticket) const;

  const int64_t page_bytes_;
  const kernels::PinnedBuffer memory_;
  const kernels::MailboxView view_;
  std::atomic<kernels::AbsentPages*> source_ = nullptr;
  std::atomic<bool> stop_ = false;
  uint32_t served_ = 0;  // the last request
  // Its list.
  int64_t layer_ = 0;
  uint64_t first_ticket_ = 0;
  std::vector<int64_t> pages_, slots_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace kvasir::worker
