#include "worker/page_metrics.h"

#include <string>

namespace kvasir::worker {

using prometheus::Labels;

PageFamilies::PageFamilies(prometheus::Registry& r)
    : lean_blocks(
          AddGauge(r, "kvasir_kv_lean_blocks", "Blocks in use whose pages lie on disk only.")),
      shed_blocks(
          AddCounter(r, "kvasir_kv_shed_blocks_total",
                     "Blocks that left the host tier for the disk while they were in use.")),
      reads(AddCounter(r, "kvasir_kv_disk_page_reads_total",
                       "Single pages read from disk, by result.")),
      waits(AddCounter(r, "kvasir_kv_disk_page_waits_total",
                       "Pages on disk that attention or a selector waited for.")),
      wait_seconds(AddCounter(r, "kvasir_kv_disk_page_wait_seconds_total",
                              "Seconds of these waits, summed over threads.")),
      prefetches(AddCounter(r, "kvasir_kv_page_prefetches_total",
                            "Pages read from disk because the last step read them, by what became "
                            "of them: used, still being read when they were wanted, or not wanted "
                            "before they left memory.")) {}

PageSeries::PageSeries(PageFamilies& f, const Labels& labels)
    : lean_blocks_(f.lean_blocks.Add(labels)) {
  const auto with = [&](const char* name, const char* value) {
    Labels all = labels;
    all[name] = value;
    return all;
  };
  shed_.counter = &f.shed_blocks.Add(labels);
  read_.counter = &f.reads.Add(with("result", "ok"));
  failed_.counter = &f.reads.Add(with("result", "failed"));
  waits_.counter = &f.waits.Add(labels);
  wait_seconds_.counter = &f.wait_seconds.Add(labels);
  used_.counter = &f.prefetches.Add(with("result", "used"));
  late_.counter = &f.prefetches.Add(with("result", "late"));
  wasted_.counter = &f.prefetches.Add(with("result", "wasted"));
}

void PageSeries::Record(const kvstore::KvStoreStats& stats) {
  const kvstore::PageCacheStats& pages = stats.pages;
  lean_blocks_.Set(static_cast<double>(stats.lean_blocks));
  shed_.Follow(stats.shed_blocks);
  read_.Follow(pages.reads - pages.failed_reads);
  failed_.Follow(pages.failed_reads);
  waits_.Follow(pages.waited);
  wait_seconds_.Follow(pages.wait_seconds);
  used_.Follow(pages.used_prefetches);
  late_.Follow(pages.late_prefetches);
  wasted_.Follow(pages.wasted_prefetches);
}

}  // namespace kvasir::worker
