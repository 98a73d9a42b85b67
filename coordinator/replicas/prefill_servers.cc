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

void PrefillServers::Read(ElsewhereRequest request,
                          const std::shared_ptr<AnswerReadElsewhere>& answer, Callbacks callbacks) {
  size_t server = 0;
  bool is_stopped = false;
  {
    MutexLock lock(mu_);
    is_stopped = is_stopped_;
    server = next_++ % servers_->size();
    if (!is_stopped) reading_.insert(answer);
  }
  if (is_stopped) return callbacks.on_end(absl::CancelledError("the server ends"));
  const std::string name = request.request.request_id();
  request.request = OneTokenOf(std::move(request.request));
  request.request.set_read_here(true);
  const auto end = [this, answer, name, address = servers_->address(server),
                    on_end = std::move(callbacks.on_end)](const absl::Status& status) {
    if (!status.ok() && !absl::IsCancelled(status)) {
      spdlog::warn("request {}: {} does not read its prompt: {}; it is read here", name, address,
                   status.ToString());
    }
    {
      MutexLock lock(answer->mu_);
      answer->is_over_ = true;
      answer->call_.reset();
    }
    on_end(status);
    MutexLock lock(mu_);
    reading_.erase(answer);
    changed_.NotifyAll();
  };
  const auto take = [on_sealed = std::move(callbacks.on_sealed)](const v1::GenerateResponse& told) {
    if (told.has_progress()) on_sealed(int64_t{told.progress().sealed_tokens()});
  };
  std::shared_ptr<ReplicaServers::Call> call =
      servers_->Generate(server, std::move(request), {.on_response = take, .on_end = end});
  {
    MutexLock lock(answer->mu_);
    if (answer->is_over_) return;
    answer->call_ = call;
    if (!answer->is_cancelled_) return;
  }
  call->Cancel();
}

void PrefillServers::Stop() {
  std::vector<std::shared_ptr<AnswerReadElsewhere>> reading;
  {
    MutexLock lock(mu_);
    is_stopped_ = true;
    reading.assign(reading_.begin(), reading_.end());
  }
  for (const auto& answer : reading) answer->Cancel();
  MutexLock lock(mu_);
  while (!reading_.empty()) changed_.Wait(mu_);
}

void AnswerReadElsewhere::Cancel() {
  std::shared_ptr<ReplicaServers::Call> call;
  {
    MutexLock lock(mu_);
    is_cancelled_ = true;
    call = call_;
  }
  if (call != nullptr) call->Cancel();  // gRPC may call back at once
}

}  // namespace kvasir::coordinator
