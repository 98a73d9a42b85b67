#include "kvstore/tiers/disk_tier_state.h"

#include <utility>

namespace kvasir::kvstore {

DiskTierState::DiskTierState(DiskTierOptions tier_options, const ExtentFormat& extent_format,
                             std::optional<HeadExtent> head_part, std::unique_ptr<File> held_lock)
    : options(std::move(tier_options)),
      format(extent_format),
      part(std::move(head_part)),
      lock(std::move(held_lock)),
      segments(*options.io, options.directory + "/segments", format.extent_bytes(),
               options.segment_bytes) {}

void DiskTierState::Forget(const PrefixHash& hash) {
  const std::optional<ExtentTable::Removal> removal = table.Remove(hash);
  if (!removal.has_value()) return;
  removals.push_back(*removal);
  events.forgotten.push_back(hash);
  happened.NotifyAll();
  wake_writer.NotifyAll();
}

void DiskTierState::Complete(TierCompletion completion) {
  events.completions.push_back(std::move(completion));
  --under_way;
  happened.NotifyAll();
}

}  // namespace kvasir::kvstore
