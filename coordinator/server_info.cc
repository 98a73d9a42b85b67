#include "coordinator/server_info.h"

#include <string>

#include "absl/strings/escaping.h"

#include "kvstore/format/block.h"
#include "proto/process/version.h"

namespace kvasir::coordinator {
namespace {

v1::ServerState State(const EngineStatus& engine) {
  if (engine.draining) return v1::SERVER_STATE_DRAINING;
  return engine.group.has_value() ? v1::SERVER_STATE_SERVING : v1::SERVER_STATE_STARTING;
}

void AddWorkers(const GroupInfo& group, v1::GetServerInfoResponse& info) {
  for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
    v1::WorkerInfo& worker = *info.add_workers();
    worker.set_rank(static_cast<uint32_t>(rank));
    worker.set_address(group.addresses[rank]);
    worker.set_device(group.ranks[rank].device_name());
    worker.set_metrics_address(group.ranks[rank].metrics_address());
  }
}

// Adds a tier of `total_bytes` that has `used` of its `total` blocks in use.
void AddTier(v1::Tier kind, uint64_t total_bytes, uint64_t used, uint64_t total,
             v1::GetServerInfoResponse& info) {
  v1::TierInfo& tier = *info.add_tiers();
  tier.set_tier(kind);
  tier.set_total_bytes(total_bytes);
  tier.set_used_blocks(used);
  tier.set_total_blocks(total);
  if (total > 0) tier.set_used_bytes(total_bytes / total * used);
}

void AddTiers(const GroupInfo& group, const v1::TierUsage& usage, v1::GetServerInfoResponse& info) {
  uint64_t device_bytes = 0;
  uint64_t host_bytes = 0;
  uint64_t disk_bytes = 0;
  uint64_t token_bytes = 0;
  for (const v1::Ready& rank : group.ranks) {
    device_bytes += rank.device_blocks() * rank.block_bytes();
    host_bytes += (rank.host_blocks() - rank.lean_blocks()) * rank.block_bytes();
    disk_bytes += rank.disk_blocks() * rank.block_bytes();
    token_bytes += rank.block_bytes() / static_cast<uint64_t>(kvstore::kBlockTokens);
  }
  info.set_kv_token_bytes(token_bytes);
  AddTier(v1::TIER_DEVICE, device_bytes, usage.device_pages_used(), usage.device_pages_total(),
          info);
  AddTier(v1::TIER_HOST, host_bytes, usage.host_blocks_used(), usage.host_blocks_total(), info);
  if (disk_bytes == 0) return;
  AddTier(v1::TIER_DISK, disk_bytes, usage.disk_blocks_used(), usage.disk_blocks_total(), info);
}

void AddTotals(const MetricsTotals& totals, v1::GetServerInfoResponse& info) {
  info.set_requests_finished(totals.requests_finished);
  info.set_requests_rejected(totals.requests_rejected);
  info.set_prompt_tokens(totals.prompt_tokens);
  info.set_generation_tokens(totals.generation_tokens);
  info.set_cached_device_tokens(totals.cached_device_tokens);
  info.set_cached_host_tokens(totals.cached_host_tokens);
  info.set_cached_disk_tokens(totals.cached_disk_tokens);
  info.set_cached_peer_tokens(totals.cached_peer_tokens);
  info.set_prefix_cache_queries(totals.prefix_queries);
  info.set_prefix_cache_hits(totals.prefix_hits);
}

}  // namespace

v1::GetModelInfoResponse ModelInfo(const v1::ServeConfig& config, const ModelFolder& folder,
                                   const PolicyTable& policies, const GroupInfo& group) {
  v1::GetModelInfoResponse info;
  info.set_model_path(config.model().model());
  info.set_served_model_name(config.served_model_name());
  info.set_model_type(folder.model_type);
  for (const std::string& name : folder.architectures) info.add_architectures(name);
  info.set_vocab_size(static_cast<uint32_t>(group.vocab_size));
  info.set_max_context_length(static_cast<uint32_t>(group.max_model_len));
  for (const int32_t id : folder.eos_token_ids) info.add_eos_token_ids(static_cast<uint32_t>(id));
  for (const v1::SparsityPolicy& policy : policies.declared()) *info.add_policies() = policy;
  info.set_kv_form(group.kv_form);
  info.set_trained_window(static_cast<uint32_t>(group.trained_window));
  info.set_weights_hash(absl::BytesToHexString(group.weights_hash));
  return info;
}

v1::GetServerInfoResponse ServerInfo(const v1::ServeConfig& config, const EngineStatus& engine,
                                     const MetricsTotals& totals, absl::Duration uptime) {
  v1::GetServerInfoResponse info;
  info.set_version(proto::Version());
  info.set_served_model_name(config.served_model_name());
  info.set_state(State(engine));
  info.set_state_reason(std::string(engine.serving.message()));
  info.mutable_uptime()->set_seconds(absl::ToInt64Seconds(uptime));
  info.set_requests_running(static_cast<uint32_t>(engine.scheduler.running));
  info.set_requests_waiting(
      static_cast<uint32_t>(engine.scheduler.waiting + engine.scheduler.restoring));
  info.set_waiting_prompt_tokens(static_cast<uint64_t>(engine.scheduler.waiting_tokens));
  info.set_max_num_seqs(config.scheduler().max_num_seqs());
  info.set_max_num_batched_tokens(config.scheduler().max_num_batched_tokens());
  AddTotals(totals, info);
  if (!engine.group.has_value()) return info;
  AddWorkers(*engine.group, info);
  AddTiers(*engine.group, engine.tiers, info);
  return info;
}

}  // namespace kvasir::coordinator
