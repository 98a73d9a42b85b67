#include "coordinator/metrics/metrics.h"

#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

#include "coordinator/scheduling/scheduler.h"
#include "kernels/base/mutex.h"
#include "kvstore/format/block.h"
#include "proto/finish_numbers.h"
#include "proto/process/process_registry.h"

namespace kvasir::coordinator {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using Labels = std::map<std::string, std::string>;

// The buckets are vLLM's, so that its dashboards fit, and finer ones below 10 ms between tokens.
const Histogram::BucketBoundaries kFirstTokenBuckets = {.001, .005, .01, .02, .04, .06, .08, .1,
                                                        .25,  .5,   .75, 1,   2.5, 5,   7.5, 10,
                                                        20,   40,   80,  160, 640, 2560};
const Histogram::BucketBoundaries kInterTokenBuckets = {
    .0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3,
    .4,    .5,   .75,   1,    2.5, 5,    7.5, 10,   20, 40,  80};
const Histogram::BucketBoundaries kRequestBuckets = {
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};

// Steps of 1, 2 and 5, up to the longest contexts.
const Histogram::BucketBoundaries kTokenBuckets = {
    1,    2,     5,     10,    20,     50,     100,    200,     500,     1000,    2000,
    5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000, 2000000, 5000000, 10000000};

uint64_t Value(const Counter& counter) { return static_cast<uint64_t>(counter.Value()); }

uint64_t Sum(const Family<Counter>& family) {
  double sum = 0;
  for (const prometheus::MetricFamily& collected : family.Collect()) {
    for (const prometheus::ClientMetric& metric : collected.metric) sum += metric.counter.value;
  }
  return static_cast<uint64_t>(sum);
}

absl::string_view FinishedReason(const absl::Status& status, const v1::Finish& summary) {
  if (status.ok()) return proto::FinishReasonName(summary.reason());
  return absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ? "abort" : "error";
}

}  // namespace

// Families are looked up once; series that need no further labels are kept.
struct Metrics::Series {
  explicit Series(const std::string& model_name) : model({{"model_name", model_name}}) {}

  Family<Counter>& Counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Labels(model).Register(registry);
  }
  Family<Gauge>& Gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Labels(model).Register(registry);
  }
  Family<Histogram>& Histograms(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Labels(model).Register(registry);
  }
  Histogram& OneHistogram(const char* name, const char* help,
                          const Histogram::BucketBoundaries& buckets) {
    return Histograms(name, help).Add({}, buckets);
  }

  const Labels model;
  proto::ProcessRegistry registry;

  Gauge& running = Gauges("kvasir_num_requests_running", "Requests being computed.").Add({});
  Gauge& waiting =
      Gauges("kvasir_num_requests_waiting", "Requests that wait to be admitted.").Add({});
  Gauge& disk_set_aside = Gauges("kvasir_kv_disk_set_aside",
                                 "1 while the disk tier is not read since it did not answer.")
                              .Add({});
  Gauge& peers_set_aside =
      Gauges("kvasir_peers_set_aside",
             "1 while peers are not asked since they failed or were slower than computing.")
          .Add({});
  Gauge& restoring =
      Gauges("kvasir_num_requests_restoring", "Waiting requests whose KV comes from disk or peers.")
          .Add({});
  Gauge& read_elsewhere =
      Gauges("kvasir_num_requests_read_elsewhere", "Requests whose prompts another server reads.")
          .Add({});
  Gauge& waiting_tokens =
      Gauges("kvasir_num_waiting_prompt_tokens", "Prompt tokens of requests that wait.").Add({});
  Gauge& cache_usage = Gauges("kvasir_kv_cache_usage_perc",
                              "Part of the room for token blocks in use that running requests "
                              "hold, 0 to 1: of the host "
                              "tier, and of what KV on demand leaves on disk.")
                           .Add({});
  Family<Gauge>& cache_config = Gauges(
      "kvasir_cache_config_info",
      "Constant 1; the labels are the tokens of a block and the blocks that each tier of a "
      "worker holds, the host tier with those that KV on demand leaves on disk. A block is a page "
      "for each layer and KV head of the worker.");
  Counter& prefix_queries =
      Counters("kvasir_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
          .Add({});
  Counter& prefix_hits =
      Counters("kvasir_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
          .Add({});
  Family<Counter>& prefix_misses =
      Counters("kvasir_prefix_cache_misses_total",
               "Prompt tokens that were not found in the prefix cache, by reason.");
  Counter& missed_absent = prefix_misses.Add({{"miss_reason", "absent"}});
  Counter& missed_unshared = prefix_misses.Add({{"miss_reason", "unshared"}});
  Counter& missed_not_restored = prefix_misses.Add({{"miss_reason", "not_restored"}});
  Counter& missed_disabled = prefix_misses.Add({{"miss_reason", "disabled"}});
  Counter& prefix_evictions =
      Counters("kvasir_prefix_cache_evictions_total", "Cached token blocks that made room.")
          .Add({});
  Family<Counter>& preemptions = Counters(
      "kvasir_num_preemptions_total",
      "Requests that gave up their slots: to others, by whether a disk tier keeps their blocks, "
      "with a worker group that was lost, for stored blocks after one that was damaged, or to be "
      "computed again where KV in use was damaged.");
  Counter& preempted_swap = preemptions.Add({{"kind", "swap"}});
  Counter& preempted_recompute = preemptions.Add({{"kind", "recompute"}});
  Counter& preempted_restore = preemptions.Add({{"kind", "restore"}});
  Counter& preempted_loss = preemptions.Add({{"kind", "loss"}});
  Counter& preempted_damage = preemptions.Add({{"kind", "damage"}});
  Family<Counter>& resumed =
      Counters("kvasir_requests_resumed_total",
               "Requests that run again, preempted ones and those that a client resumes, by where "
               "they found blocks of theirs.");
  Counter& resumed_host = resumed.Add({{"from", "host"}});
  Counter& resumed_disk = resumed.Add({{"from", "disk"}});
  Counter& resumed_peer = resumed.Add({{"from", "peer"}});
  Counter& resumed_recompute = resumed.Add({{"from", "recompute"}});
  Family<Counter>& moves = Counters(
      "kvasir_requests_moved_total",
      "Running requests of a server that drains, by result: moved to another server, stays because "
      "none took it, lost after it had moved.");
  Counter& moved = moves.Add({{"result", "moved"}});
  Counter& move_stays = moves.Add({{"result", "stays"}});
  Counter& move_lost = moves.Add({{"result", "lost"}});
  Counter& plans_ahead =
      Counters("kvasir_plans_ahead_total",
               "Steps that were planned before the one before them was answered.")
          .Add({});
  Counter& rows_in_vain = Counters("kvasir_rows_in_vain_total",
                                   "Rows of steps whose request had ended when they were answered.")
                              .Add({});
  Counter& prompt_tokens =
      Counters("kvasir_prompt_tokens_total",
               "Prompt tokens whose KV is ready, computed or cached; counted as prompts are read.")
          .Add({});
  Counter& generation_tokens =
      Counters("kvasir_generation_tokens_total", "Tokens generated for finished requests.").Add({});
  Family<Counter>& cached_by_source =
      Counters("kvasir_prompt_tokens_cached_by_source_total",
               "Prompt tokens whose KV was reused, by the tier it was found in.");
  Counter& cached_device = cached_by_source.Add({{"source", "device"}});
  Counter& cached_host = cached_by_source.Add({{"source", "host"}});
  Counter& cached_disk = cached_by_source.Add({{"source", "disk"}});
  Counter& cached_peer = cached_by_source.Add({{"source", "peer"}});
  Family<Counter>& success =
      Counters("kvasir_request_success_total", "Requests that were admitted and have ended.");
  Family<Counter>& rejected =
      Counters("kvasir_requests_rejected_total", "Requests refused before they ran.");
  Family<Histogram>& first_token = Histograms(
      "kvasir_time_to_first_token_seconds",
      "From a request's arrival to its first token, by policy and by whether some of the "
      "prompt was cached.");
  Family<Histogram>& inter_token =
      Histograms("kvasir_inter_token_latency_seconds",
                 "Between one token of a request and the next, by policy.");
  Histogram& e2e = OneHistogram("kvasir_e2e_request_latency_seconds",
                                "From a request's arrival to its end.", kRequestBuckets);
  Histogram& queue = OneHistogram("kvasir_request_queue_time_seconds",
                                  "From a request's arrival to its admission.", kRequestBuckets);
  Histogram& prefill =
      OneHistogram("kvasir_request_prefill_time_seconds",
                   "From a request's admission to its first token.", kRequestBuckets);
  Histogram& decode = OneHistogram("kvasir_request_decode_time_seconds",
                                   "From a request's first token to its last.", kRequestBuckets);
  Histogram& inference =
      OneHistogram("kvasir_request_inference_time_seconds",
                   "From a request's admission to its last token.", kRequestBuckets);
  Histogram& per_token =
      OneHistogram("kvasir_request_time_per_output_token_seconds",
                   "Mean time of a request's tokens after the first.", kInterTokenBuckets);
  Histogram& prompt_length =
      OneHistogram("kvasir_request_prompt_tokens", "Tokens of a request's prompt.", kTokenBuckets);
  Histogram& answer_length = OneHistogram("kvasir_request_generation_tokens",
                                          "Tokens generated for a request.", kTokenBuckets);
  Family<Gauge>& worker_up =
      Gauges("kvasir_worker_up", "1 while the worker is part of the formed group.");
  Counter& groups_lost =
      Counters("kvasir_worker_group_losses_total",
               "Formed groups that ended because a rank failed; their requests wait for the next.")
          .Add({});

  Family<Gauge>& contexts = Gauges("kvasir_contexts", "Named contexts, by state.");
  Gauge& contexts_waiting = contexts.Add({{"state", "waiting"}});
  Gauge& contexts_reading = contexts.Add({{"state", "reading"}});
  Gauge& contexts_ready = contexts.Add({{"state", "ready"}});
  Gauge& contexts_failed = contexts.Add({{"state", "failed"}});
  Gauge& contexts_evicted = contexts.Add({{"state", "evicted"}});
  Family<Gauge>& pinned =
      Gauges("kvasir_pinned_blocks", "Token blocks that contexts have pinned, by tier.");
  Gauge& pinned_host = pinned.Add({{"tier", "host"}});
  Gauge& pinned_disk = pinned.Add({{"tier", "disk"}});
  Family<Counter>& erased_blocks =
      Counters("kvasir_erased_blocks_total", "Token blocks that were overwritten on request.");
  Counter& erased_host_blocks = erased_blocks.Add({{"tier", "host"}});
  Counter& erased_disk_blocks = erased_blocks.Add({{"tier", "disk"}});
  Family<Counter>& erased_bytes =
      Counters("kvasir_erased_bytes_total",
               "Bytes that were overwritten on request, those of blocks that had gone before too.");
  Counter& erased_host_bytes = erased_bytes.Add({{"tier", "host"}});
  Counter& erased_disk_bytes = erased_bytes.Add({{"tier", "disk"}});

  Counter& spans_exported =
      Counters("kvasir_trace_spans_exported_total", "Spans of traces that the collector took.")
          .Add({});
  Family<Counter>& spans_dropped = Counters(
      "kvasir_trace_spans_dropped_total",
      "Spans of traces that were dropped: too many waited, the collector did not take a batch, or "
      "rejected a part of it.");
  Counter& spans_queue_full = spans_dropped.Add({{"reason", "queue_full"}});
  Counter& spans_export_failed = spans_dropped.Add({{"reason", "export_failed"}});
  Counter& spans_rejected = spans_dropped.Add({{"reason", "rejected"}});

  struct Latencies {
    Histogram* warm = nullptr;  // to the first token
    Histogram* cold = nullptr;
    Histogram* next = nullptr;
  };
  absl::flat_hash_map<std::string, Latencies> by_policy;  // constant after construction

  kernels::Mutex mu;
  Gauge* config GUARDED_BY(mu) = nullptr;
  // Sums of the scheduler at the last update; they start at 0 again with every group.
  SchedulerStats seen GUARDED_BY(mu);
};

Metrics::Metrics(const std::string& model_name, const std::vector<std::string>& policies)
    : series_(std::make_unique<Series>(model_name)) {
  Series& s = *series_;
  for (const std::string& policy : policies) {
    const auto first = [&](const char* cache) {
      return &s.first_token.Add({{"policy", policy}, {"cache", cache}}, kFirstTokenBuckets);
    };
    s.by_policy[policy] = {.warm = first("hit"),
                           .cold = first("miss"),
                           .next = &s.inter_token.Add({{"policy", policy}}, kInterTokenBuckets)};
  }
  for (const char* reason : {"stop", "length", "abort", "error"}) {
    series_->success.Add({{"finished_reason", reason}});  // shown as 0 from the start
  }
  for (const char* reason : {"invalid_argument", "resource_exhausted", "unavailable"}) {
    series_->rejected.Add({{"reason", reason}});
  }
}

Metrics::~Metrics() = default;

prometheus::Registry& Metrics::registry() { return series_->registry; }

void Metrics::RequestRejected(const absl::Status& status) {
  const std::string reason = absl::AsciiStrToLower(absl::StatusCodeToString(status.code()));
  series_->rejected.Add({{"reason", reason}}).Increment();
}

void Metrics::PromptRead(int64_t tokens) {
  series_->prompt_tokens.Increment(static_cast<double>(tokens));
}

void Metrics::FirstToken(const std::string& policy, Cache cache, absl::Duration since_arrival) {
  const Series::Latencies& latencies = series_->by_policy.at(policy);
  (cache == Cache::kHit ? latencies.warm : latencies.cold)
      ->Observe(absl::ToDoubleSeconds(since_arrival));
}

void Metrics::NextToken(const std::string& policy, absl::Duration since_last) {
  series_->by_policy.at(policy).next->Observe(absl::ToDoubleSeconds(since_last));
}

void Metrics::RequestFinished(const absl::Status& status, const v1::Finish& summary,
                              absl::Duration since_arrival) {
  Series& s = *series_;
  s.success.Add({{"finished_reason", std::string(FinishedReason(status, summary))}}).Increment();
  s.generation_tokens.Increment(summary.usage().completion_tokens());
  const v1::CachedTokens& cached = summary.usage().cached_tokens();
  s.cached_device.Increment(cached.device());
  s.cached_host.Increment(cached.host());
  s.cached_disk.Increment(cached.disk());
  s.cached_peer.Increment(cached.peer());
  s.e2e.Observe(absl::ToDoubleSeconds(since_arrival));
  s.prompt_length.Observe(summary.usage().prompt_tokens());
  s.answer_length.Observe(summary.usage().completion_tokens());
  const v1::Timing& timing = summary.timing();
  s.queue.Observe(proto::ToSeconds(timing.queue()));
  if (!timing.has_time_to_first_token()) return;
  const double prefill =
      proto::ToSeconds(timing.time_to_first_token()) - proto::ToSeconds(timing.queue());
  const double decode = proto::ToSeconds(timing.decode());
  s.prefill.Observe(prefill);
  s.decode.Observe(decode);
  s.inference.Observe(prefill + decode);
  const uint32_t tokens = summary.usage().completion_tokens();
  if (tokens > 1) s.per_token.Observe(decode / (tokens - 1));
}

void Metrics::RequestMoved(Move result) {
  (result == Move::kMoved   ? series_->moved
   : result == Move::kStays ? series_->move_stays
                            : series_->move_lost)
      .Increment();
}

void Metrics::SpansExported(int64_t count) {
  series_->spans_exported.Increment(static_cast<double>(count));
}

void Metrics::SpansDropped(SpanDrop reason, int64_t count) {
  Series& s = *series_;
  Counter& counter = reason == SpanDrop::kQueueFull      ? s.spans_queue_full
                     : reason == SpanDrop::kExportFailed ? s.spans_export_failed
                                                         : s.spans_rejected;
  counter.Increment(static_cast<double>(count));
}

MetricsTotals Metrics::totals() const {
  const Series& s = *series_;
  return {.requests_finished = Sum(s.success),
          .requests_rejected = Sum(s.rejected),
          .prompt_tokens = Value(s.prompt_tokens),
          .generation_tokens = Value(s.generation_tokens),
          .cached_device_tokens = Value(s.cached_device),
          .cached_host_tokens = Value(s.cached_host),
          .cached_disk_tokens = Value(s.cached_disk),
          .cached_peer_tokens = Value(s.cached_peer),
          .prefix_queries = Value(s.prefix_queries),
          .prefix_hits = Value(s.prefix_hits)};
}

void Metrics::ContextStates(const ContextCounts& counts) {
  series_->contexts_waiting.Set(static_cast<double>(counts.waiting));
  series_->contexts_reading.Set(static_cast<double>(counts.reading));
  series_->contexts_ready.Set(static_cast<double>(counts.ready));
  series_->contexts_failed.Set(static_cast<double>(counts.failed));
  series_->contexts_evicted.Set(static_cast<double>(counts.evicted));
}

void Metrics::Erased(const v1::Erased& erased) {
  series_->erased_host_blocks.Increment(static_cast<double>(erased.host_blocks()));
  series_->erased_disk_blocks.Increment(static_cast<double>(erased.disk_blocks()));
  series_->erased_host_bytes.Increment(static_cast<double>(erased.host_bytes()));
  series_->erased_disk_bytes.Increment(static_cast<double>(erased.disk_bytes()));
}

void Metrics::SchedulerState(const SchedulerStats& stats) {
  Series& s = *series_;
  s.running.Set(static_cast<double>(stats.running));
  s.waiting.Set(static_cast<double>(stats.waiting + stats.restoring));
  s.restoring.Set(static_cast<double>(stats.restoring));
  s.read_elsewhere.Set(static_cast<double>(stats.read_elsewhere));
  s.disk_set_aside.Set(stats.disk_set_aside ? 1 : 0);
  s.peers_set_aside.Set(stats.peers_set_aside ? 1 : 0);
  s.waiting_tokens.Set(static_cast<double>(stats.waiting_tokens));
  s.pinned_host.Set(static_cast<double>(stats.pinned_host_blocks));
  s.pinned_disk.Set(static_cast<double>(stats.pinned_disk_blocks));
  const int64_t capacity = stats.index.capacity_blocks;
  s.cache_usage.Set(capacity == 0 ? 0
                                  : static_cast<double>(stats.index.held_blocks) /
                                        static_cast<double>(capacity));
  kernels::MutexLock lock(s.mu);
  const SchedulerStats seen = std::exchange(s.seen, stats);
  const auto advance = [](Counter& counter, int64_t before, int64_t now) {
    if (now > before) counter.Increment(static_cast<double>(now - before));
  };
  advance(s.prefix_queries, seen.prefix_queries, stats.prefix_queries);
  advance(s.prefix_hits, seen.prefix_hits, stats.prefix_hits);
  advance(s.missed_absent, seen.missed_absent, stats.missed_absent);
  advance(s.missed_unshared, seen.missed_unshared, stats.missed_unshared);
  advance(s.missed_not_restored, seen.missed_not_restored, stats.missed_not_restored);
  advance(s.missed_disabled, seen.missed_disabled, stats.missed_disabled);
  advance(s.prefix_evictions, seen.index.evictions, stats.index.evictions);
  advance(s.preempted_swap, seen.preempted_swap, stats.preempted_swap);
  advance(s.preempted_recompute, seen.preempted_recompute, stats.preempted_recompute);
  advance(s.preempted_restore, seen.preempted_restore, stats.preempted_restore);
  advance(s.preempted_loss, seen.preempted_loss, stats.preempted_loss);
  advance(s.preempted_damage, seen.preempted_damage, stats.preempted_damage);
  advance(s.resumed_disk, seen.resumed_disk, stats.resumed_disk);
  advance(s.resumed_peer, seen.resumed_peer, stats.resumed_peer);
  advance(s.resumed_host, seen.resumed_host, stats.resumed_host);
  advance(s.resumed_recompute, seen.resumed_recompute, stats.resumed_recompute);
  advance(s.plans_ahead, seen.plans_ahead, stats.plans_ahead);
  advance(s.rows_in_vain, seen.rows_in_vain, stats.rows_in_vain);
}

void Metrics::GroupFormed(const CacheConfigInfo& info) {
  Series& s = *series_;
  kernels::MutexLock lock(s.mu);
  if (s.config != nullptr) s.cache_config.Remove(s.config);
  s.config =
      &s.cache_config.Add({{"block_size", absl::StrCat(kvstore::kBlockTokens)},
                           {"num_device_blocks", absl::StrCat(info.num_device_blocks)},
                           {"num_host_blocks", absl::StrCat(info.num_host_blocks)},
                           {"num_disk_blocks", absl::StrCat(info.num_disk_blocks)},
                           {"kv_cache_dtype", info.kv_cache_dtype},
                           {"tensor_parallel_size", absl::StrCat(info.tensor_parallel_size)}});
  s.config->Set(1);
}

void Metrics::GroupLost() { series_->groups_lost.Increment(); }

void Metrics::WorkerUp(int64_t rank, bool up) {
  series_->worker_up.Add({{"rank", absl::StrCat(rank)}}).Set(up ? 1 : 0);
}

}  // namespace kvasir::coordinator
