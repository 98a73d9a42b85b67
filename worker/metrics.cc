#include "worker/metrics.h"

#include <array>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"

#include "worker/metric_families.h"
#include "worker/page_metrics.h"

namespace kvasir::worker {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;

const Histogram::BucketBoundaries kStepSeconds = {.001, .0025, .005, .01, .025, .05, .1,
                                                  .25,  .5,    1,    2.5, 5,    10,  30};
const Histogram::BucketBoundaries kGapSeconds = {.00001, .00003, .0001, .0003, .001,
                                                 .003,   .01,    .03,   .1,    1};
const Histogram::BucketBoundaries kStepTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096};
const Histogram::BucketBoundaries kBudgetTokens = {
    64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576};
const Histogram::BucketBoundaries kMassKept = {.5, .7, .8, .9, .95, .97, .98, .99, .995, .999, 1};

Family<Histogram>& AddHistogram(prometheus::Registry& registry, const char* name,
                                const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

struct PeerFamilies {
  explicit PeerFamilies(prometheus::Registry& r)
      : workers(AddGauge(r, "kvasir_peers",
                         "Workers of other replicas: those that this one was told of, and those "
                         "among them that answer.")),
        blocks(AddCounter(r, "kvasir_peer_blocks_total",
                          "Blocks that peers were asked for, by result, and those lent to them.")) {
  }

  Family<Gauge>& workers;
  Family<Counter>& blocks;
};

struct StepFamilies {
  explicit StepFamilies(prometheus::Registry& r)
      : seconds(AddHistogram(r, "kvasir_step_seconds", "Time of one step on this rank.")),
        gap_seconds(AddHistogram(r, "kvasir_step_gap_seconds",
                                 "Time without a step on this rank while a running request waited "
                                 "for the next; 0 where it had begun.")),
        tokens(AddHistogram(r, "kvasir_step_tokens", "Tokens computed in one step.")) {}

  Family<Histogram>& seconds;
  Family<Histogram>& gap_seconds;
  Family<Histogram>& tokens;
};

}  // namespace

struct WorkerMetrics::Families {
  explicit Families(prometheus::Registry& r)
      : tier_pages(AddGauge(r, "kvasir_kv_tier_pages", "Pages of a tier, by state.")),
        tier_bytes(AddGauge(r, "kvasir_kv_tier_bytes", "Size of a tier.")),
        lookups(AddCounter(r, "kvasir_kv_page_lookups_total",
                           "Pages that steps read, by whether the tier held them.")),
        transfer_bytes(
            AddCounter(r, "kvasir_kv_transfer_bytes_total", "Bytes of KV moved between tiers.")),
        transfer_seconds(AddCounter(r, "kvasir_kv_transfer_seconds_total",
                                    "Seconds that a disk spent in these transfers.")),
        disk_written(AddCounter(r, "kvasir_kv_disk_written_bytes_total",
                                "Bytes written to the disk tier: its wear.")),
        writes_dropped(AddCounter(r, "kvasir_kv_writes_dropped_total",
                                  "Pages that were not written to a tier, by reason.")),
        restored(AddCounter(r, "kvasir_kv_restored_pages_total",
                            "Pages asked back from the disk tier or peers, by result.")),
        adopted(AddCounter(r, "kvasir_blocks_adopted_total",
                           "Sealed blocks that an earlier group left in host memory.")),
        adopted_used(AddCounter(r, "kvasir_adopted_blocks_used_total",
                                "Those of them that were verified and are used again.")),
        adopted_dropped(AddCounter(r, "kvasir_adopted_blocks_dropped_total",
                                   "Blocks in host memory that are not used again, by reason: "
                                   "their header is torn, other bytes than were sealed, or room "
                                   "was needed.")),
        read_only(AddGauge(r, "kvasir_kv_tier_read_only",
                           "1 while a tier takes no writes because it failed or is full.")),
        evictions(AddCounter(r, "kvasir_kv_page_evictions_total",
                             "Pages that lost their place in a tier.")),
        checksum_failures(AddCounter(r, "kvasir_kv_page_checksum_failures_total",
                                     "Checks that found other bytes than were stored: of a page in "
                                     "host memory, of a block on disk or of one of its pages.")),
        read_errors(AddCounter(r, "kvasir_kv_read_errors_total",
                               "Reads that a device failed at first; each is tried once more.")),
        peers(r),
        steps(r),
        pages(r),
        blocks(AddCounter(r, "kvasir_attention_blocks_total",
                          "Pages that dense attention would have read, over layers and KV heads.")),
        blocks_skipped(AddCounter(r, "kvasir_attention_blocks_skipped_total",
                                  "Pages among them that were not read, by reason.")),
        mask_refresh(AddCounter(r, "kvasir_mask_refresh_total",
                                "Where selections are reused: by stage of the selector, how often "
                                "it ran and how often it served with what it had left, over "
                                "layers and KV heads.")),
        selection_memory(AddGauge(r, "kvasir_selection_memory_bytes",
                                  "Memory reserved for selections that serve later steps.")),
        mass_kept(AddHistogram(r, "kvasir_attention_mass_kept_ratio",
                               "Attention mass that a selection kept, measured on a sample of "
                               "(layer, query head) by dense recomputation.")),
        mass_estimated(AddHistogram(r, "kvasir_attention_mass_estimated_ratio",
                                    "Attention mass that a query head keeps under a policy with "
                                    "min_mass, as estimated.")),
        contracts(AddCounter(r, "kvasir_mass_contract_total",
                             "Selections of decoding under a policy with min_mass, by layer and KV "
                             "head: what became of them.")),
        dense_fallback(AddCounter(r, "kvasir_dense_fallback_total",
                                  "Selections of decoding that were made dense.")),
        budget_tokens(AddHistogram(r, "kvasir_attention_budget_tokens",
                                   "Tokens that a query of decoding attended to, by layer and KV "
                                   "head.")),
        failed_rows(AddCounter(r, "kvasir_failed_rows_total",
                               "Rows of steps that failed alone, by status code; the first of each "
                               "sequence.")) {}

  Family<Gauge>& tier_pages;
  Family<Gauge>& tier_bytes;
  Family<Counter>& lookups;
  Family<Counter>& transfer_bytes;
  Family<Counter>& transfer_seconds;
  Family<Counter>& disk_written;
  Family<Counter>& writes_dropped;
  Family<Counter>& restored;
  Family<Counter>& adopted;
  Family<Counter>& adopted_used;
  Family<Counter>& adopted_dropped;
  Family<Gauge>& read_only;
  Family<Counter>& evictions;
  Family<Counter>& checksum_failures;
  Family<Counter>& read_errors;
  PeerFamilies peers;
  StepFamilies steps;
  PageFamilies pages;
  Family<Counter>& blocks;
  Family<Counter>& blocks_skipped;
  Family<Counter>& mask_refresh;
  Family<Gauge>& selection_memory;
  Family<Histogram>& mass_kept;
  Family<Histogram>& mass_estimated;
  Family<Counter>& contracts;
  Family<Counter>& dense_fallback;
  Family<Histogram>& budget_tokens;
  Family<Counter>& failed_rows;
};

// Attention under one of the declared policies.
struct WorkerMetrics::PolicySeries {
  PolicySeries(Families& f, Labels base)
      : labels(std::move(base)),
        mass_estimated(f.mass_estimated.Add(labels, kMassKept)),
        contracts_kept(f.contracts.Add(With({{"outcome", "kept"}}))),
        contracts_dense(f.contracts.Add(With({{"outcome", "dense"}}))),
        contracts_widened(f.contracts.Add(With({{"outcome", "widened"}}))),
        contracts_missed(f.contracts.Add(With({{"outcome", "missed"}}))),
        dense_fallback(f.dense_fallback.Add(With({{"reason", "min_mass"}}))),
        budget_tokens(f.budget_tokens.Add(labels, kBudgetTokens)) {
    for (size_t phase = 0; phase < blocks.size(); ++phase) {
      const std::string name = static_cast<Phase>(phase) == Phase::kPrefill ? "prefill" : "decode";
      blocks[phase] = &f.blocks.Add(With({{"phase", name}}));
      selected_out[phase] =
          &f.blocks_skipped.Add(With({{"phase", name}, {"reason", "selected_out"}}));
      window[phase] = &f.blocks_skipped.Add(With({{"phase", name}, {"reason", "window"}}));
      pruned[phase] = &f.blocks_skipped.Add(With({{"phase", name}, {"reason", "pruned"}}));
      terminated[phase] = &f.blocks_skipped.Add(With({{"phase", name}, {"reason", "terminated"}}));
      mass_kept[phase] = &f.mass_kept.Add(With({{"phase", name}}), kMassKept);
    }
    for (size_t s = 0; s < kernels::kMaxStages; ++s) {
      const std::string stage = absl::StrCat(s + 1);
      stages_run[s] = &f.mask_refresh.Add(With({{"stage", stage}, {"kind", "refresh"}}));
      stages_reused[s] = &f.mask_refresh.Add(With({{"stage", stage}, {"kind", "reuse"}}));
    }
  }

  Labels With(Labels more) const {
    more.insert(labels.begin(), labels.end());
    return more;
  }

  void Record(const RowAttention& row);
  void RecordContract(const ContractCounts& counts);

  const Labels labels;
  Histogram& mass_estimated;
  Counter& contracts_kept;
  Counter& contracts_dense;
  Counter& contracts_widened;
  Counter& contracts_missed;
  Counter& dense_fallback;
  Histogram& budget_tokens;
  std::array<Counter*, kernels::kMaxStages> stages_run = {}, stages_reused = {};
  // By Phase.
  std::array<Counter*, 2> blocks = {}, selected_out = {}, window = {}, pruned = {}, terminated = {};
  std::array<Histogram*, 2> mass_kept = {};
};

struct WorkerMetrics::Series {
  Series(Families& f, const GroupLabels& group)
      : labels({{"model_name", group.model_name}, {"rank", absl::StrCat(group.rank)}}),
        has_disk(group.disk_tier),
        device_used(f.tier_pages.Add(With({{"tier", "device"}, {"state", "used"}}))),
        device_free(f.tier_pages.Add(With({{"tier", "device"}, {"state", "free"}}))),
        host_used(f.tier_pages.Add(With({{"tier", "host"}, {"state", "used"}}))),
        host_free(f.tier_pages.Add(With({{"tier", "host"}, {"state", "free"}}))),
        device_bytes(f.tier_bytes.Add(With({{"tier", "device"}}))),
        host_bytes(f.tier_bytes.Add(With({{"tier", "host"}}))),
        hits{&f.lookups.Add(With({{"tier", "device"}, {"result", "hit"}}))},
        misses{&f.lookups.Add(With({{"tier", "device"}, {"result", "miss"}}))},
        to_device{&f.transfer_bytes.Add(With({{"from", "host"}, {"to", "device"}}))},
        to_host{&f.transfer_bytes.Add(With({{"from", "device"}, {"to", "host"}}))},
        evictions{&f.evictions.Add(With({{"tier", "device"}}))},
        checksum_failures{&f.checksum_failures.Add(With({{"tier", "host"}}))},
        adopted{&f.adopted.Add(labels)},
        adopted_used{&f.adopted_used.Add(labels)},
        adopted_torn{&f.adopted_dropped.Add(With({{"reason", "torn"}}))},
        adopted_damaged{&f.adopted_dropped.Add(With({{"reason", "checksum"}}))},
        adopted_evicted{&f.adopted_dropped.Add(With({{"reason", "room"}}))},
        disk_used(f.tier_pages.Add(With({{"tier", "disk"}, {"state", "used"}}))),
        disk_free(f.tier_pages.Add(With({{"tier", "disk"}, {"state", "free"}}))),
        disk_dirty(f.tier_pages.Add(With({{"tier", "disk"}, {"state", "dirty"}}))),
        disk_bytes(f.tier_bytes.Add(With({{"tier", "disk"}}))),
        disk_read_only(f.read_only.Add(With({{"tier", "disk"}}))),
        to_disk{&f.transfer_bytes.Add(With({{"from", "host"}, {"to", "disk"}}))},
        from_disk{&f.transfer_bytes.Add(With({{"from", "disk"}, {"to", "host"}}))},
        to_disk_seconds{&f.transfer_seconds.Add(With({{"from", "host"}, {"to", "disk"}}))},
        from_disk_seconds{&f.transfer_seconds.Add(With({{"from", "disk"}, {"to", "host"}}))},
        disk_written{&f.disk_written.Add(labels)},
        dropped_busy{&f.writes_dropped.Add(With({{"tier", "disk"}, {"reason", "busy"}}))},
        dropped_read_only{&f.writes_dropped.Add(With({{"tier", "disk"}, {"reason", "read_only"}}))},
        dropped_error{&f.writes_dropped.Add(With({{"tier", "disk"}, {"reason", "error"}}))},
        restored{&f.restored.Add(With({{"result", "ok"}}))},
        not_restored{&f.restored.Add(With({{"result", "failed"}}))},
        disk_evictions{&f.evictions.Add(With({{"tier", "disk"}}))},
        disk_checksum_failures{&f.checksum_failures.Add(With({{"tier", "disk"}}))},
        disk_read_errors{&f.read_errors.Add(With({{"tier", "disk"}}))},
        peers_configured(f.peers.workers.Add(With({{"state", "configured"}}))),
        peers_linked(f.peers.workers.Add(With({{"state", "linked"}}))),
        from_peer{&f.transfer_bytes.Add(With({{"from", "peer"}, {"to", "host"}}))},
        to_peer{&f.transfer_bytes.Add(With({{"from", "host"}, {"to", "peer"}}))},
        fetched{&f.peers.blocks.Add(With({{"result", "fetched"}}))},
        absent{&f.peers.blocks.Add(With({{"result", "absent"}}))},
        not_fetched{&f.peers.blocks.Add(With({{"result", "failed"}}))},
        refused{&f.peers.blocks.Add(With({{"result", "refused"}}))},
        lent{&f.peers.blocks.Add(With({{"result", "lent"}}))},
        pages(f.pages, labels),
        selection_memory(f.selection_memory.Add(labels)),
        step_seconds(f.steps.seconds.Add(labels, kStepSeconds)),
        step_gap_seconds(f.steps.gap_seconds.Add(labels, kGapSeconds)),
        step_tokens(f.steps.tokens.Add(labels, kStepTokens)) {
    for (const std::string& policy : group.policies) {
      policies.emplace_back(f, With({{"policy", policy}}));
    }
    for (const absl::StatusCode code :
         {absl::StatusCode::kDataLoss, absl::StatusCode::kResourceExhausted}) {
      f.failed_rows.Add(
          With({{"code", absl::StatusCodeToString(code)}}));  // shown as 0 from the start
    }
  }

  Labels With(Labels more) const {
    more.insert(labels.begin(), labels.end());
    return more;
  }

  const Labels labels;
  const bool has_disk;
  Gauge& device_used;
  Gauge& device_free;
  Gauge& host_used;
  Gauge& host_free;
  Gauge& device_bytes;
  Gauge& host_bytes;
  Following hits, misses, to_device, to_host, evictions, checksum_failures;
  Following adopted, adopted_used, adopted_torn, adopted_damaged, adopted_evicted;
  Gauge& disk_used;
  Gauge& disk_free;
  Gauge& disk_dirty;
  Gauge& disk_bytes;
  Gauge& disk_read_only;
  Following to_disk, from_disk, to_disk_seconds, from_disk_seconds, disk_written;
  Following dropped_busy, dropped_read_only, dropped_error, restored, not_restored;
  Following disk_evictions, disk_checksum_failures, disk_read_errors;
  Gauge& peers_configured;
  Gauge& peers_linked;
  Following from_peer, to_peer, fetched, absent, not_fetched, refused, lent;
  PageSeries pages;
  Gauge& selection_memory;
  Histogram& step_seconds;
  Histogram& step_gap_seconds;
  Histogram& step_tokens;
  // Slots of failed sequences: rows that were planned before the coordinator heard of the failure
  // come back with the same error.
  std::set<uint32_t> failed_slots;
  std::vector<PolicySeries> policies;  // by Sequence::policy
};

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry)
    : families_(std::make_unique<Families>(registry)) {}

WorkerMetrics::~WorkerMetrics() = default;

void WorkerMetrics::JoinGroup(const GroupLabels& labels) {
  series_ = std::make_unique<Series>(*families_, labels);
}

void WorkerMetrics::RecordStep(const Engine& engine, const v1::StepPlan& plan,
                               const v1::StepReply& reply) {
  RecordTiers(engine);
  RecordFailures(plan, reply);
  if (reply.results().empty()) return;  // nothing was computed
  int64_t tokens = 0;
  for (const v1::StepRow& row : plan.rows()) tokens += row.num_tokens();
  series_->step_seconds.Observe(reply.step_s());
  if (plan.starts_size() < plan.rows_size()) {  // a row goes on
    series_->step_gap_seconds.Observe(engine.gap_s());
  }
  series_->step_tokens.Observe(static_cast<double>(tokens));
  RecordAttention(engine.meter());
}

void WorkerMetrics::RecordFailures(const v1::StepPlan& plan, const v1::StepReply& reply) {
  for (const v1::SequenceStart& start : plan.starts()) series_->failed_slots.erase(start.slot());
  for (const v1::RowResult& result : reply.results()) {
    if (result.error_code() == 0 || !series_->failed_slots.insert(result.slot()).second) continue;
    const auto code = static_cast<absl::StatusCode>(result.error_code());
    families_->failed_rows.Add(series_->With({{"code", absl::StatusCodeToString(code)}}))
        .Increment();
  }
}

void WorkerMetrics::RecordTiers(const Engine& engine) {
  const kvstore::KvStoreStats stats = engine.store().stats();
  Series& s = *series_;
  const auto pages = [&](int64_t blocks) {
    return static_cast<double>(blocks * engine.pages_per_block());
  };
  s.device_used.Set(static_cast<double>(stats.device_pages_used));
  s.device_free.Set(static_cast<double>(stats.device_pages_total - stats.device_pages_used));
  s.host_used.Set(pages(stats.host_blocks_used));
  s.host_free.Set(pages(stats.host_blocks_total - stats.host_blocks_used));
  const double page_bytes = static_cast<double>(engine.block_bytes()) / pages(1);
  s.device_bytes.Set(static_cast<double>(stats.device_pages_total) * page_bytes);
  s.host_bytes.Set(pages(stats.host_blocks_total) * page_bytes);
  s.hits.Follow(stats.device_hits);
  s.misses.Follow(stats.device_misses);
  s.to_device.Follow(stats.bytes_host_to_device);
  s.to_host.Follow(stats.bytes_device_to_host);
  s.evictions.Follow(stats.evictions);
  s.checksum_failures.Follow(stats.checksum_failures);
  s.adopted.Follow(stats.adoption.found);
  s.adopted_used.Follow(stats.adoption.used);
  s.adopted_torn.Follow(stats.adoption.torn);
  s.adopted_damaged.Follow(stats.adoption.damaged);
  s.adopted_evicted.Follow(stats.adoption.evicted);
  s.selection_memory.Set(static_cast<double>(engine.selection_memory_bytes()));
  RecordDisk(engine, stats);
  RecordPeers(stats.tier.peers);
  s.pages.Record(stats);
}

void WorkerMetrics::RecordPeers(const kvstore::PeerStats& peers) {
  Series& s = *series_;
  s.peers_configured.Set(static_cast<double>(peers.configured));
  s.peers_linked.Set(static_cast<double>(peers.linked));
  s.from_peer.Follow(peers.fetched_bytes);
  s.to_peer.Follow(peers.lent_bytes);
  s.fetched.Follow(peers.fetched_blocks);
  s.absent.Follow(peers.absent_blocks);
  s.not_fetched.Follow(peers.failed_blocks);
  s.refused.Follow(peers.refused_blocks);
  s.lent.Follow(peers.lent_blocks);
}

void WorkerMetrics::RecordDisk(const Engine& engine, const kvstore::KvStoreStats& stats) {
  const kvstore::TierStats& disk = stats.tier;
  Series& s = *series_;
  const auto pages = [&](int64_t blocks) { return blocks * engine.pages_per_block(); };
  const auto set = [&](Gauge& gauge, int64_t blocks) {
    gauge.Set(static_cast<double>(pages(blocks)));
  };
  set(s.disk_used, disk.blocks);
  set(s.disk_free, disk.capacity_blocks - disk.blocks);
  set(s.disk_dirty, stats.queued_writes);
  s.disk_bytes.Set(static_cast<double>(disk.capacity_blocks * engine.block_bytes()));
  s.disk_read_only.Set(s.has_disk && !disk.writable ? 1 : 0);
  s.to_disk.Follow(disk.written_bytes);
  s.from_disk.Follow(disk.read_bytes);
  s.to_disk_seconds.Follow(disk.write_seconds);
  s.from_disk_seconds.Follow(disk.read_seconds);
  s.disk_written.Follow(disk.written_bytes);
  s.dropped_busy.Follow(pages(stats.dropped_writes));
  s.dropped_read_only.Follow(pages(disk.refused_writes));
  s.dropped_error.Follow(pages(disk.failed_writes));
  s.restored.Follow(pages(stats.restored_blocks));
  s.not_restored.Follow(pages(stats.failed_restores));
  s.disk_evictions.Follow(pages(disk.evictions));
  s.disk_checksum_failures.Follow(disk.checksum_failures);
  s.disk_read_errors.Follow(disk.failed_reads);
}

void WorkerMetrics::RecordAttention(const AttentionMeter& meter) {
  for (int64_t r = 0; r < meter.num_rows(); ++r) {
    series_->policies[meter.row(r).policy].Record(meter.row(r));
  }
}

void WorkerMetrics::PolicySeries::Record(const RowAttention& row) {
  const auto add = [](Counter* counter, int64_t n) { counter->Increment(static_cast<double>(n)); };
  for (size_t phase = 0; phase < row.counts.size(); ++phase) {
    const AttentionCounts& counts = row.counts[phase];
    add(blocks[phase], counts.total);
    add(selected_out[phase], counts.selected_out);
    add(window[phase], counts.window);
    add(pruned[phase], counts.pruned);
    add(terminated[phase], counts.terminated);
    for (size_t s = 0; s < kernels::kMaxStages; ++s) {
      add(stages_run[s], counts.stages_run[s]);
      add(stages_reused[s], counts.stages_reused[s]);
    }
    for (const float mass : row.masses[phase]) mass_kept[phase]->Observe(mass);
  }
  for (const float mass : row.estimates) mass_estimated.Observe(mass);
  for (const int64_t tokens : row.budgets) budget_tokens.Observe(static_cast<double>(tokens));
  RecordContract(row.contract);
}

void WorkerMetrics::PolicySeries::RecordContract(const ContractCounts& counts) {
  const auto add = [](Counter& counter, int64_t n) { counter.Increment(static_cast<double>(n)); };
  add(contracts_kept, counts.rows - counts.dense - counts.widened - counts.missed);
  add(contracts_dense, counts.dense);
  add(contracts_widened, counts.widened);
  add(contracts_missed, counts.missed);
  add(dense_fallback, counts.dense);
}

}  // namespace kvasir::worker
