// Servers that read long prompts for this one (--prefill-servers): their workers, which are peers
// of ours, then have the blocks, and ours fetch them. Made by the server, called by the API.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "coordinator/replicas/replica_servers.h"
#include "coordinator/request/client_sink.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

class PrefillServers {
 public:
  // Null when there are none. INVALID_ARGUMENT as ReplicaServers, and without --peers.
  static absl::StatusOr<std::unique_ptr<PrefillServers>> Create(const v1::ServeConfig& config,
                                                                const v1::TlsClientConfig& tls);

  // Whether the prompt is read elsewhere. Its log probabilities are computed where they are told.
  bool Takes(const v1::GenerateRequest& request, int64_t prompt_tokens) const {
    return prompt_tokens >= min_tokens_ && !request.sampling().has_prompt_logprobs();
  }
  // Has a server read the prompt, which takes as long as computing it. Calls `on_end` once, on any
  // thread: when it has been read, or cannot be, which is logged, or the client has left; before it
  // returns after Stop.
  void Read(ElsewhereRequest request, const std::shared_ptr<ClientSink>& client,
            std::function<void()> on_end) EXCLUDES(mu_);
  // Cancels all of them and waits until they have ended. A text that was long to tokenize may come
  // to Read later.
  void Stop() EXCLUDES(mu_);

 private:
  PrefillServers(std::unique_ptr<ReplicaServers> servers, int64_t min_tokens)
      : servers_(std::move(servers)), min_tokens_(min_tokens) {}
  void Cancel(uint64_t id) EXCLUDES(mu_);

  const std::unique_ptr<const ReplicaServers> servers_;  // not empty
  const int64_t min_tokens_;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  bool is_stopped_ GUARDED_BY(mu_) = false;
  uint64_t next_ GUARDED_BY(mu_) = 0;  // servers are asked in turn
  struct Reading {
    std::shared_ptr<ReplicaServers::Call> call = nullptr;  // once it is known
    bool is_cancelled = false;
  };
  absl::flat_hash_map<uint64_t, Reading> readings_ GUARDED_BY(mu_);
};

}  // namespace kvasir::coordinator
