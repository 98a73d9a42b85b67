#include "kvstore/host/checksum_thread.h"

namespace kvasir::kvstore {

using kernels::MutexLock;

ChecksumThread::ChecksumThread(const ExtentFormat& format, const HostSlab& slab)
    : format_(format),
      slab_(slab),
      uses_(static_cast<size_t>(slab.num_extents())),
      thread_("checksums", [this](const Work& work) { Run(work); }) {}

void ChecksumThread::Begin(int64_t extent, const PrefixHash& hash) {
  uint64_t use = 0;
  {
    MutexLock lock(mu_);
    use = uses_[static_cast<size_t>(extent)].number;
  }
  thread_.Add({.extent = extent, .use = use, .hash = hash});
}

bool ChecksumThread::IsDone(int64_t extent) const {
  MutexLock lock(mu_);
  return uses_[static_cast<size_t>(extent)].is_done;
}

void ChecksumThread::Forget(int64_t extent) {
  MutexLock lock(mu_);
  Use& use = uses_[static_cast<size_t>(extent)];
  use = {.number = use.number + 1};
  while (running_ == extent) changed_.Wait(mu_);
}

void ChecksumThread::Run(const Work& work) {
  {
    MutexLock lock(mu_);
    if (uses_[static_cast<size_t>(work.extent)].number != work.use) return;
    running_ = work.extent;
  }
  const kernels::KvLayout& layout = format_.shard().layout;
  for (int64_t page = 0; page < layout.pages_per_block(); ++page) {
    const absl::Span<const std::byte> bytes(slab_.page(work.extent, page),
                                            static_cast<size_t>(layout.page_bytes()));
    slab_.checksums(work.extent)[static_cast<size_t>(page)] =
        PageChecksum(format_.identity(work.hash, page), bytes);
  }
  MutexLock lock(mu_);
  running_ = -1;
  Use& use = uses_[static_cast<size_t>(work.extent)];
  use.is_done = use.number == work.use;
  changed_.NotifyAll();
}

}  // namespace kvasir::kvstore
