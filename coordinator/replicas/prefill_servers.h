// Servers that read long prompts for this one (--prefill-servers): their workers, which are peers
// of ours, have the blocks, and ours fetch them while the prompt is read. Made by the server,
// called by the API. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/replicas/replica_servers.h"
#include "coordinator/request/response_sink.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Sink of an answer whose prompt another server reads: when the answer ends, so does the reading.
class AnswerReadElsewhere final : public ResponseSink {
 public:
  explicit AnswerReadElsewhere(std::shared_ptr<ResponseSink> answer) : answer_(std::move(answer)) {}

  void Write(v1::GenerateResponse response) override { answer_->Write(std::move(response)); }
  void Close(const absl::Status& status) override EXCLUDES(mu_) {
    Cancel();
    answer_->Close(status);
  }
  // Ends the reading soon, or before it begins.
  void Cancel() EXCLUDES(mu_);

 private:
  friend class PrefillServers;

  const std::shared_ptr<ResponseSink> answer_;
  kernels::Mutex mu_;
  std::shared_ptr<ReplicaServers::Call> call_ GUARDED_BY(mu_);  // once it is known
  bool is_cancelled_ GUARDED_BY(mu_) = false;
  bool is_over_ GUARDED_BY(mu_) = false;  // the call has ended
};

class PrefillServers {
 public:
  // Null when there are none. INVALID_ARGUMENT as ReplicaServers, and without --peers.
  static absl::StatusOr<std::unique_ptr<PrefillServers>> Create(const v1::ServeConfig& config,
                                                                const v1::TlsClientConfig& tls);

  // Whether the prompt is read elsewhere. Its log probabilities are computed where they are told.
  bool Takes(const v1::GenerateRequest& request, int64_t prompt_tokens) const {
    return prompt_tokens >= min_tokens_ && !request.read_here() &&
           !request.sampling().has_prompt_logprobs();
  }
  struct Callbacks {
    // The prompt's first tokens of which the server has sealed the blocks.
    std::function<void(int64_t sealed_tokens)> on_sealed;
    // OK when the prompt has been read; else it cannot be, which is logged, or the answer ended.
    std::function<void(const absl::Status&)> on_end;
  };
  // Has a server read the prompt, which takes as long as computing it. Callbacks come one at a time
  // on any thread, and on_end once, as the last; before it returns after Stop.
  void Read(ElsewhereRequest request, const std::shared_ptr<AnswerReadElsewhere>& answer,
            Callbacks callbacks) EXCLUDES(mu_);
  // Cancels all of them and waits until they have ended. A text that was long to tokenize may come
  // to Read later.
  void Stop() EXCLUDES(mu_);

 private:
  PrefillServers(std::unique_ptr<ReplicaServers> servers, int64_t min_tokens)
      : servers_(std::move(servers)), min_tokens_(min_tokens) {}

  const std::unique_ptr<const ReplicaServers> servers_;  // not empty
  const int64_t min_tokens_;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  bool is_stopped_ GUARDED_BY(mu_) = false;
  size_t next_ GUARDED_BY(mu_) = 0;  // servers are asked in turn
  absl::flat_hash_set<std::shared_ptr<AnswerReadElsewhere>> reading_ GUARDED_BY(mu_);
};

}  // namespace kvasir::coordinator
