#include "coordinator/server_parts.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "spdlog/spdlog.h"

#include "coordinator/policy/policy_file.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/block.h"

namespace kvasir::coordinator {

std::string ModelName(const v1::ServeConfig& config) {
  if (!config.served_model_name().empty()) return config.served_model_name();
  const absl::string_view path = absl::StripSuffix(config.model().model(), "/");
  return std::string(path.substr(path.rfind('/') + 1));  // npos + 1 is 0
}

absl::StatusOr<PolicyTable> MakePolicies(const v1::ServeConfig& config) {
  std::vector<v1::SparsityPolicy> declared = {PolicyFromFlags(config.sparse())};
  if (!config.policies().empty()) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<v1::SparsityPolicy> more,
                            LoadPolicyFile(config.policies()));
    declared.insert(declared.end(), more.begin(), more.end());
  }
  return PolicyTable::Create(std::move(declared));
}

std::vector<std::string> NamesOf(const PolicyTable& policies) {
  std::vector<std::string> names;
  for (const v1::SparsityPolicy& policy : policies.declared()) names.push_back(policy.name());
  return names;
}

uint32_t TokensOfStep(const v1::ServeConfig& config) {
  constexpr uint32_t kOnCpu = 512;
  constexpr uint32_t kOnGpu = 2048;
  const auto block = static_cast<uint32_t>(kvstore::kBlockTokens);
  const uint32_t asked = config.scheduler().max_num_batched_tokens();
  if (asked == 0) return config.device() == "cuda" ? kOnGpu : kOnCpu;
  return std::max(asked / block, 1u) * block;
}

v1::ShardPlan MakeShardPlan(const v1::ServeConfig& config, const PolicyTable& policies) {
  v1::ShardPlan plan;
  *plan.mutable_model() = config.model();
  *plan.mutable_kv() = config.kv();
  plan.set_max_num_seqs(config.scheduler().max_num_seqs());
  plan.set_max_num_batched_tokens(config.scheduler().max_num_batched_tokens());
  for (const v1::SparsityPolicy& policy : policies.declared()) *plan.add_policies() = policy;
  plan.set_mass_sample_rate(config.sparse().mass_sample_rate());
  plan.set_collective_timeout_s(config.rank_timeout());
  plan.set_served_model_name(config.served_model_name());
  return plan;
}

v1::TlsClientConfig TlsToOthers(const v1::ServeConfig& config) {
  v1::TlsClientConfig tls;
  if (config.tls_ca_file().empty()) return tls;
  tls.set_tls_ca_file(config.tls_ca_file());
  tls.set_tls_cert_file(config.tls().tls_cert_file());
  tls.set_tls_key_file(config.tls().tls_key_file());
  return tls;
}

// The topic by which routers know this server, if none is given: kv@HOST:PORT@MODEL.
KvEventOptions KvEventOptionsOf(const v1::ServeConfig& config) {
  const v1::KvEventConfig& events = config.kv_events();
  return {.endpoint = events.kv_events_endpoint(),
          .replay_endpoint = events.kv_events_replay_endpoint(),
          .topic = events.kv_events_topic().empty()
                       ? absl::StrCat("kv@", config.endpoint().host(), ":",
                                      config.endpoint().port(), "@", config.served_model_name())
                       : events.kv_events_topic()};
}

absl::StatusOr<std::unique_ptr<Contexts>> OpenContexts(const v1::ServeConfig& config, Clock& clock,
                                                       Metrics& metrics) {
  ContextsOptions options;
  options.folder = config.contexts_path();
  options.max_contexts = config.max_contexts();
  options.max_tokens = static_cast<int64_t>(config.max_context_tokens());
  options.max_tenant_contexts = config.max_tenant_contexts();
  options.max_tenant_tokens = config.max_tenant_context_tokens();
  options.pin_host_bytes = std::llround(config.context_pin_host_gb() * 1e9);
  options.pin_disk_bytes = std::llround(config.context_pin_disk_gb() * 1e9);
  const std::string& disk = config.kv().kv_disk_path();
  const bool is_beside_stores = options.folder.empty() && !disk.empty();
  if (is_beside_stores) options.folder = absl::StrCat(disk, "/contexts");
  absl::StatusOr<std::unique_ptr<Contexts>> opened = Contexts::Open(options, clock, metrics);
  if (opened.ok() || !is_beside_stores) return opened;
  spdlog::warn("{}; contexts end with this process, --contexts-path names another folder",
               std::string(opened.status().message()));
  options.folder.clear();
  return Contexts::Open(options, clock, metrics);
}

}  // namespace kvasir::coordinator
