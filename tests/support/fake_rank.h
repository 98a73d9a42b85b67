// The worker's side of proto/kvasir/v1/worker.proto on paper: takes part in the handshake (ready
// once it has heard the rendezvous entries of all other ranks) and answers plans like a
// SymbolicWorker. Used behind a fake stream or behind a real gRPC service. Thread-compatible.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "proto/worker_protocol.h"
#include "tests/support/symbolic_worker.h"

namespace kvasir::testing {

struct FakeRankOptions {
  SymbolicWorkerOptions worker = {};
  // Changes what it sends: a Ready, a reply. Returning false swallows the message.
  std::function<bool(v1::WorkerMessage&)> tweak = nullptr;
  // Errors on the stream: instead of loading, instead of a step.
  absl::Status load_error = {};
  absl::Status step_error = {};
  // False: it sends a wrong proof of the group secret and listens on.
  bool proves = true;
};

class FakeRank {
 public:
  explicit FakeRank(FakeRankOptions options) : options_(std::move(options)) {}

  // What the worker sends upon `message`; an error ends the stream.
  absl::StatusOr<std::vector<v1::WorkerMessage>> Answer(const v1::CoordinatorMessage& message) {
    answers_.clear();
    switch (message.message_case()) {
      case v1::CoordinatorMessage::kShardPlan:
        KVASIR_RETURN_IF_ERROR(Load(message.shard_plan()));
        break;
      case v1::CoordinatorMessage::kRendezvous:
        peers_.insert(message.rendezvous().key() + message.rendezvous().value());
        break;
      case v1::CoordinatorMessage::kStepPlan:
        KVASIR_RETURN_IF_ERROR(Step(message.step_plan()));
        break;
      case v1::CoordinatorMessage::kProof:  // never here: the handshake takes it
      case v1::CoordinatorMessage::MESSAGE_NOT_SET:
        return absl::InvalidArgumentError("no plan and no rendezvous");
    }
    if (!ready_ && peers_.size() + 1 == plan_.tensor_parallel_size()) SendReady();
    return std::move(answers_);
  }

  const v1::ShardPlan& plan() const { return plan_; }

 private:
  absl::Status Load(const v1::ShardPlan& plan) {
    KVASIR_RETURN_IF_ERROR(options_.load_error);
    if (plan.protocol_version() != proto::kWorkerProtocolVersion) {
      return absl::InvalidArgumentError("another protocol version");
    }
    plan_ = plan;
    worker_ = std::make_unique<SymbolicWorker>(options_.worker);
    v1::WorkerMessage loading;
    loading.mutable_load_progress()->set_fraction(0.5);
    Send(std::move(loading));
    v1::WorkerMessage entry;
    entry.mutable_rendezvous()->set_key(absl::StrCat("rank/", plan.tensor_parallel_rank()));
    entry.mutable_rendezvous()->set_value("address");
    Send(std::move(entry));
    return absl::OkStatus();
  }

  void SendReady() {
    ready_ = true;
    v1::WorkerMessage message;
    v1::Ready& ready = *message.mutable_ready();
    ready.set_weights_hash(std::string(32, 'w'));
    ready.set_kv_form("rotated/float32");
    ready.set_device_blocks(static_cast<uint64_t>(options_.worker.device_blocks));
    ready.set_host_blocks(static_cast<uint64_t>(options_.worker.host_blocks));
    ready.set_disk_blocks(static_cast<uint64_t>(options_.worker.disk_blocks));
    ready.set_vocab_size(static_cast<uint32_t>(options_.worker.vocab_size));
    ready.set_max_model_len(10000);
    Send(std::move(message));
  }

  absl::Status Step(const v1::StepPlan& plan) {
    KVASIR_RETURN_IF_ERROR(options_.step_error);
    v1::WorkerMessage message;
    KVASIR_ASSIGN_OR_RETURN(*message.mutable_step_reply(), worker_->Execute(plan));
    Send(std::move(message));
    return absl::OkStatus();
  }

  void Send(v1::WorkerMessage message) {
    if (options_.tweak && !options_.tweak(message)) return;
    answers_.push_back(std::move(message));
  }

  const FakeRankOptions options_;
  v1::ShardPlan plan_;
  std::set<std::string> peers_;
  bool ready_ = false;
  std::unique_ptr<SymbolicWorker> worker_;
  std::vector<v1::WorkerMessage> answers_;
};

}  // namespace kvasir::testing
