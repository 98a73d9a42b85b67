#include "coordinator/group/grpc_worker_client.h"

#include <deque>
#include <optional>
#include <utility>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/client_callback.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/security/group_handshake.h"
#include "proto/worker_protocol.h"

namespace kvasir::coordinator {
namespace {

using kernels::Mutex;
using kernels::MutexLock;

// A worker that comes back may have another address: its name is looked up again so soon.
constexpr int kLookUpAgainMs = 1000;

grpc::ChannelArguments WorkerChannelArguments(const WorkerPings& pings) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kLookUpAgainMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, pings.interval_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, pings.timeout_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetMaxReceiveMessageSize(proto::kMaxWorkerMessageBytes);
  arguments.SetMaxSendMessageSize(proto::kMaxWorkerMessageBytes);
  // Find a worker that comes back soon. Streams of one worker share nothing.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

// Set by the last reaction, on gRPC's thread. Shared, so that the waiting thread may go on and
// destroy everything else while gRPC's thread returns.
struct Completion {
  void Set() {
    MutexLock lock(mu);
    done = true;
    changed.NotifyAll();
  }
  void Wait() {
    MutexLock lock(mu);
    while (!done) changed.Wait(mu);
  }

  Mutex mu;
  kernels::CondVar changed;
  bool done GUARDED_BY(mu) = false;
};

// Owns the channel. Its user's thread destroys it, after the last reaction: gRPC joins its callback
// threads when the last channel is destroyed, so a thread that destroyed it within a reaction would
// wait for itself.
//
// No Start* is called under mu_: gRPC may run a reaction inside it.
class GrpcWorkerClient final
    : public WorkerClient,
      private grpc::ClientBidiReactor<v1::CoordinatorMessage, v1::WorkerMessage> {
 public:
  GrpcWorkerClient(const std::shared_ptr<grpc::Channel>& channel,
                   std::shared_ptr<const proto::GroupSecret> secret, Listener& listener)
      : stub_(v1::Worker::NewStub(channel)), listener_(listener), handshake_(std::move(secret)) {
    context_.set_wait_for_ready(true);
    stub_->async()->Run(&context_, this);
    AddHold();  // for writes outside reactions; removed with the last of them
    StartRead(&incoming_);
    StartCall();
  }
  ~GrpcWorkerClient() override {
    context_.TryCancel();
    completion_->Wait();
  }

  void Send(v1::CoordinatorMessage message) override EXCLUDES(mu_) {
    {
      MutexLock lock(mu_);
      if (!proven_) {
        if (!closed_) held_.push_back(std::move(message));
        return;
      }
    }
    Push(std::move(message));
  }

 private:
  void Push(v1::CoordinatorMessage message) EXCLUDES(mu_) {
    const v1::CoordinatorMessage* first = nullptr;
    {
      MutexLock lock(mu_);
      if (closed_) return;
      outbox_.push_back(std::move(message));
      if (outbox_.size() > 1) return;
      first = &outbox_.front();
    }
    StartWrite(first);
  }

  // Takes a message of the worker before its proof.
  void OnHandshake() EXCLUDES(mu_) {
    if (!refused_.ok()) return;  // on its way out
    absl::StatusOr<std::optional<v1::CoordinatorMessage>> answer = handshake_.OnMessage(incoming_);
    if (!answer.ok()) {
      refused_ = answer.status();
      context_.TryCancel();
    } else if (answer->has_value()) {
      Push(**std::move(answer));
    } else if (handshake_.done()) {
      ReleaseHeld();
    }
  }

  // Sends what was held back until the worker's proof, in order.
  void ReleaseHeld() EXCLUDES(mu_) {
    const v1::CoordinatorMessage* first = nullptr;
    {
      MutexLock lock(mu_);
      proven_ = true;
      if (closed_ || held_.empty()) return;
      const bool idle = outbox_.empty();
      for (v1::CoordinatorMessage& message : held_) outbox_.push_back(std::move(message));
      held_.clear();
      if (idle) first = &outbox_.front();
    }
    if (first != nullptr) StartWrite(first);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Close();
    if (handshake_.done()) {
      listener_.OnMessage(std::move(incoming_));
    } else {
      OnHandshake();
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override EXCLUDES(mu_) {
    const v1::CoordinatorMessage* next = nullptr;
    bool last = false;
    {
      MutexLock lock(mu_);
      outbox_.pop_front();
      if (closed_ || !ok) outbox_.clear();  // after a failed write the next read fails too
      if (!outbox_.empty()) next = &outbox_.front();
      last = closed_;
    }
    if (next != nullptr) StartWrite(next);
    if (last) RemoveHold();
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Completion> completion = completion_;
    absl::Status why = refused_.ok() ? proto::FromGrpcStatus(status) : refused_;
    if (why.ok()) why = absl::UnavailableError("the worker ended the stream");
    listener_.OnClosed(why);
    completion->Set();
  }

  void Close() EXCLUDES(mu_) {
    bool idle = false;
    {
      MutexLock lock(mu_);
      closed_ = true;
      idle = outbox_.empty();
    }
    if (idle) RemoveHold();
  }

  const std::unique_ptr<v1::Worker::Stub> stub_;
  Listener& listener_;
  const std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
  grpc::ClientContext context_;
  v1::WorkerMessage incoming_;  // of the read in flight
  // Used by reactions to reads, and by the last one.
  proto::CoordinatorHandshake handshake_;
  absl::Status refused_;  // not OK: the worker has not proven the secret

  Mutex mu_;
  bool proven_ GUARDED_BY(mu_) = false;
  std::deque<v1::CoordinatorMessage> held_ GUARDED_BY(mu_);    // until the worker's proof
  std::deque<v1::CoordinatorMessage> outbox_ GUARDED_BY(mu_);  // the front is being written
  bool closed_ GUARDED_BY(mu_) = false;
};

}  // namespace

WorkerDialer GrpcWorkerDialer(std::shared_ptr<const proto::GroupSecret> secret,
                              std::shared_ptr<proto::ChannelTls> tls, WorkerPings pings) {
  return [secret, tls, pings](const std::string& address, WorkerClient::Listener& listener) {
    return std::make_unique<GrpcWorkerClient>(
        grpc::CreateCustomChannel(address, tls->CredentialsFor(address),
                                  WorkerChannelArguments(pings)),
        secret, listener);
  };
}

}  // namespace kvasir::coordinator
