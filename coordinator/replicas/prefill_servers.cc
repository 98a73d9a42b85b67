#include "coordinator/replicas/prefill_servers.h"

#include <string>
#include <vector>

#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

using kernels::MutexLock;

absl::StatusOr<std::unique_ptr<PrefillServers>> PrefillServers::Create(
    const v1::ServeConfig& config, const v1::TlsClientConfig& tls) {
  if (config.prefill_servers().empty()) return nullptr;
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<ReplicaServers> servers,
      ReplicaServers::Create("--prefill-servers", config.prefill_servers(), tls));
  if (servers->size() == 0 || config.peers().empty()) {
    return absl::InvalidArgumentError(
        "--prefill-servers needs addresses, and --peers by which the workers fetch what was read");
  }
  return std::unique_ptr<PrefillServers>(
      new PrefillServers(std::move(servers), int64_t{config.prefill_min_tokens()}));
}

void PrefillServers::Read(ElsewhereRequest request, const std::shared_ptr<ClientSink>& client,
                          std::function<void()> on_end) {
  uint64_t id = 0;
  bool is_stopped = false;
  {
    MutexLock lock(mu_);
    is_stopped = is_stopped_;
    id = next_++;
    if (!is_stopped) readings_[id] = {};
  }
  if (is_stopped) return on_end();
  client->set_on_cancel([this, id](const absl::Status&) { Cancel(id); });
  const size_t server = id % servers_->size();
  const std::string name = request.request.request_id();
  request.request = OneTokenOf(std::move(request.request));
  const auto end = [this, id, name, address = servers_->address(server),
                    on_end = std::move(on_end)](const absl::Status& status) {
    if (!status.ok() && !absl::IsCancelled(status)) {
      spdlog::warn("request {}: {} does not read its prompt: {}; it is read here", name, address,
                   status.ToString());
    }
    on_end();
    MutexLock lock(mu_);
    readings_.erase(id);
    changed_.NotifyAll();
  };
  std::shared_ptr<ReplicaServers::Call> call =
      servers_->Generate(server, std::move(request),
                         {.on_response = [](const v1::GenerateResponse&) {}, .on_end = end});
  {
    MutexLock lock(mu_);
    const auto it = readings_.find(id);
    if (it == readings_.end()) return;  // it has ended
    it->second.call = call;
    if (!it->second.is_cancelled) return;
  }
  call->Cancel();
}

void PrefillServers::Cancel(uint64_t id) {
  std::shared_ptr<ReplicaServers::Call> call;
  {
    MutexLock lock(mu_);
    const auto it = readings_.find(id);
    if (it == readings_.end()) return;
    it->second.is_cancelled = true;
    call = it->second.call;
  }
  if (call != nullptr) call->Cancel();  // gRPC may call back at once
}

void PrefillServers::Stop() {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    is_stopped_ = true;
    for (const auto& [id, reading] : readings_) ids.push_back(id);
  }
  for (const uint64_t id : ids) Cancel(id);
  MutexLock lock(mu_);
  while (!readings_.empty()) changed_.Wait(mu_);
}

}  // namespace kvasir::coordinator
