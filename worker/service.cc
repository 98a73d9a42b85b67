#include "worker/service.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/security/group_handshake.h"

namespace kvasir::worker {
namespace {

using kernels::Mutex;
using kernels::MutexLock;

// A coordinator is at most one step ahead; a peer with more queued messages is not a coordinator.
constexpr size_t kMaxQueuedMessages = 64;
// Whoever reaches the port causes these warnings.
constexpr absl::Duration kWarningInterval = absl::Seconds(1);

}  // namespace

// One stream. Until its proof is claimed it is unproven: the proof, the end of the stream, the
// alarm or the service claims it, whichever is first. Then it is the engine's, or it ends. gRPC's
// threads call the On* reactions, the engine thread the rest. gRPC may run a reaction inside the
// call that starts its operation, so no Start* or Finish happens under mu_.
class WorkerService::Stream final
    : public grpc::ServerBidiReactor<v1::CoordinatorMessage, v1::WorkerMessage>,
      public CoordinatorStream {
 public:
  Stream(WorkerService& service, std::string peer)
      : service_(service),
        peer_(std::move(peer)),
        handshake_(service.options_.secret),
        rendezvous_([this](const std::string& key, const std::string& value) {
          v1::WorkerMessage message;
          message.mutable_rendezvous()->set_key(key);
          message.mutable_rendezvous()->set_value(value);
          Write(std::move(message));
        }) {}

  // `self` keeps the stream alive until gRPC is done with it.
  void Start(std::shared_ptr<Stream> self) {
    self_ = std::move(self);
    StartRead(&incoming_);
    Write(handshake_.Challenge());
    proof_alarm_.Set(
        absl::ToChronoTime(absl::Now() + service_.options_.proof_time),
        [weak = std::weak_ptr<Stream>(self_)](bool rang) {
          const std::shared_ptr<Stream> stream = rang ? weak.lock() : nullptr;
          if (stream == nullptr) return;
          stream->EndUnproven(absl::DeadlineExceededError("no proof of the group secret in time"));
        });
  }

  // Ends the stream if it is still unproven.
  void EndUnproven(const absl::Status& why) {
    if (!ClaimProof()) return;
    EndReads(why);
    Close(why);
  }

  // --- engine thread ---

  std::optional<v1::CoordinatorMessage> Read() override {
    MutexLock lock(mu_);
    while (inbox_.empty() && end_status_.ok()) readable_.Wait(mu_);
    if (!end_status_.ok())
      return std::nullopt;  // nobody would receive the answers to what is still queued
    v1::CoordinatorMessage message = std::move(inbox_.front());
    inbox_.pop_front();
    return message;
  }

  bool WaitReadable(absl::Duration patience) override {
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(patience);
    MutexLock lock(mu_);
    while (inbox_.empty() && end_status_.ok()) {
      if (!readable_.WaitUntil(mu_, deadline)) return !inbox_.empty() || !end_status_.ok();
    }
    return true;
  }

  void Write(v1::WorkerMessage message) override {
    const v1::WorkerMessage* first = nullptr;
    {
      MutexLock lock(mu_);
      if (write_failed_ || close_status_) return;
      outbox_.push_back(std::move(message));
      if (writing_) return;
      writing_ = true;
      first = &outbox_.front();
    }
    StartWrite(first);
  }

  void Fail(const absl::Status& why) override {
    EndReads(why);
    Close(why);
  }

  Rendezvous& rendezvous() override { return rendezvous_; }

  // Ends the call once everything queued has been written. The first status is kept.
  void Close(const absl::Status& status) {
    {
      MutexLock lock(mu_);
      if (close_status_) return;
      close_status_ = status;
      if (writing_) return;
    }
    Finish(proto::ToGrpcStatus(status));
  }

  // --- any thread ---

  // Stops reading messages. The first reason is kept.
  void EndReads(const absl::Status& why) {
    rendezvous_.Fail(why);
    MutexLock lock(mu_);
    if (end_status_.ok()) end_status_ = why;
    readable_.NotifyAll();
  }
  // Returns why reading ended; OK while it has not.
  absl::Status end_status() {
    MutexLock lock(mu_);
    return end_status_;
  }

  // --- gRPC ---

  void OnReadDone(bool ok) override {
    if (!ok) {
      const absl::Status gone = absl::CancelledError("the coordinator ended the stream");
      EndUnproven(gone);
      EndReads(gone);
      return;
    }
    if (!proven_) {
      if (Prove()) StartRead(&incoming_);
      return;
    }
    service_.connections_.OnMessage(peer_, incoming_.ByteSizeLong());
    if (incoming_.has_rendezvous()) {
      rendezvous_.Deliver(incoming_.rendezvous().key(), incoming_.rendezvous().value());
    } else if (!Enqueue()) {
      EndReads(absl::ResourceExhaustedError(
          absl::StrCat("more than ", kMaxQueuedMessages, " plans sent ahead of their replies")));
      return;
    }
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    const v1::WorkerMessage* next = nullptr;
    std::optional<absl::Status> close;
    {
      MutexLock lock(mu_);
      outbox_.pop_front();
      if (!ok) {
        write_failed_ = true;
        outbox_.clear();
      }
      writing_ = !outbox_.empty();
      if (writing_) {
        next = &outbox_.front();
      } else {
        close = close_status_;
      }
    }
    if (next != nullptr) StartWrite(next);
    if (close) Finish(proto::ToGrpcStatus(*close));
  }

  void OnCancel() override {
    const absl::Status cancelled = absl::CancelledError("the stream was cancelled");
    EndUnproven(cancelled);
    EndReads(cancelled);
  }
  void OnDone() override {
    call_.reset();
    self_.reset();
  }

 private:
  // Returns true once.
  bool ClaimProof() {
    {
      MutexLock lock(mu_);
      if (std::exchange(claimed_, true)) return false;
    }
    service_.ForgetUnproven(*this);
    return true;
  }

  // Takes the first message. Returns false when the stream is not admitted.
  bool Prove() {
    const absl::StatusOr<v1::WorkerMessage> proof = handshake_.Answer(incoming_);
    incoming_.Clear();
    if (!proof.ok()) {
      service_.WarnUnproven(peer_, proof.status());
      EndUnproven(proof.status());
      return false;
    }
    if (!ClaimProof()) return false;
    proven_ = true;
    proof_alarm_.Cancel();
    // Only now: the connection of an unproven stream gives way to others.
    call_ = service_.connections_.BeginCall(peer_);
    Write(*proof);
    if (const absl::Status admitted = service_.Admit(self_); !admitted.ok()) {
      EndReads(admitted);
      Close(admitted);
      return false;
    }
    spdlog::info("coordinator at {}", peer_);
    v1::WorkerMessage here;  // without this the coordinator gives up sooner
    here.mutable_load_progress()->set_stage("accepted");
    Write(std::move(here));
    return true;
  }

  bool Enqueue() {
    MutexLock lock(mu_);
    if (inbox_.size() >= kMaxQueuedMessages) return false;
    inbox_.push_back(std::move(incoming_));
    incoming_.Clear();
    readable_.NotifyOne();
    return true;
  }

  WorkerService& service_;
  const std::string peer_;
  proto::WorkerHandshake handshake_;
  grpc::Alarm proof_alarm_;
  bool proven_ = false;  // used by reactions to reads
  // From the proof to OnDone; null where the listener knows no connection of the peer, as on unix:.
  std::unique_ptr<proto::GrpcListener::Call> call_;
  v1::CoordinatorMessage incoming_;  // target of the read in flight
  Rendezvous rendezvous_;
  std::shared_ptr<Stream> self_;  // from Start to OnDone

  Mutex mu_;
  bool claimed_ GUARDED_BY(mu_) = false;
  kernels::CondVar readable_;
  std::deque<v1::CoordinatorMessage> inbox_ GUARDED_BY(mu_);
  absl::Status end_status_ GUARDED_BY(mu_);               // not OK: nothing more is read
  std::deque<v1::WorkerMessage> outbox_ GUARDED_BY(mu_);  // the front is being written
  bool writing_ GUARDED_BY(mu_) = false;
  bool write_failed_ GUARDED_BY(mu_) = false;
  std::optional<absl::Status> close_status_ GUARDED_BY(mu_);
};

// The answer to a stream that is refused.
class WorkerService::Refusal final
    : public grpc::ServerBidiReactor<v1::CoordinatorMessage, v1::WorkerMessage> {
 public:
  explicit Refusal(const absl::Status& status) { Finish(proto::ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

WorkerService::WorkerService(WorkerServiceOptions options, Serve serve,
                             proto::GrpcListener& connections)
    : options_(std::move(options)),
      serve_(std::move(serve)),
      connections_(connections),
      engine_thread_([this] { RunEngineThread(); }) {}

WorkerService::~WorkerService() { KVASIR_CHECK(!engine_thread_.joinable()); }

grpc::ServerBidiReactor<v1::CoordinatorMessage, v1::WorkerMessage>* WorkerService::Run(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<Stream>(*this, context->peer());
  if (!AddUnproven(stream)) {
    return new Refusal(absl::UnavailableError("the worker is shutting down"));
  }
  stream->Start(stream);
  return stream.get();
}

bool WorkerService::AddUnproven(std::shared_ptr<Stream> stream) {
  std::shared_ptr<Stream> oldest;
  {
    MutexLock lock(mu_);
    if (stopping_) return false;
    if (unproven_.size() == kMostUnproven) oldest = unproven_.front();
    unproven_.push_back(std::move(stream));
  }
  if (oldest != nullptr) {
    oldest->EndUnproven(absl::ResourceExhaustedError(
        absl::StrCat("more than ", kMostUnproven, " streams prove no group secret")));
  }
  return true;
}

void WorkerService::ForgetUnproven(const Stream& stream) {
  MutexLock lock(mu_);
  const auto same = [&](const std::shared_ptr<Stream>& other) { return other.get() == &stream; };
  unproven_.erase(std::remove_if(unproven_.begin(), unproven_.end(), same), unproven_.end());
}

absl::Status WorkerService::Admit(std::shared_ptr<Stream> stream) {
  std::shared_ptr<Stream> replaced;
  {
    MutexLock lock(mu_);
    if (stopping_) return absl::UnavailableError("the worker is shutting down");
    const auto gives_way = [](const std::shared_ptr<Stream>& other) {
      return other == nullptr || !other->end_status().ok();
    };
    if (current_ == nullptr) {
      current_ = std::move(stream);
    } else if (gives_way(current_) && gives_way(next_)) {
      // A new group, while the end of the old one is still being handled.
      replaced = std::exchange(next_, std::move(stream));
      LimitLeaving();
    } else {
      return absl::AlreadyExistsError(
          "this worker has a coordinator; stop that one or let it leave first");
    }
    changed_.NotifyAll();
  }
  if (replaced != nullptr) replaced->Close(replaced->end_status());
  return absl::OkStatus();
}

void WorkerService::LimitLeaving() {
  if (leave_alarm_ != nullptr) return;
  leave_alarm_ = std::make_unique<grpc::Alarm>();
  leave_alarm_->Set(absl::ToChronoTime(absl::Now() + options_.leave_time),
                    [this, leaving = current_](bool rang) {
                      if (!rang) return;
                      {
                        MutexLock lock(mu_);
                        if (current_ != leaving || stopping_) return;
                      }
                      options_.on_stuck();
                    });
}

void WorkerService::WarnUnproven(const std::string& peer, const absl::Status& why) {
  {
    MutexLock lock(mu_);
    const absl::Time now = absl::Now();
    if (now - warned_at_ < kWarningInterval) return;
    warned_at_ = now;
  }
  spdlog::warn("stream from {} refused: {}", peer, std::string(why.message()));
}

void WorkerService::RunEngineThread() {
  for (;;) {
    std::shared_ptr<Stream> stream;
    {
      MutexLock lock(mu_);
      while (current_ == nullptr && !stopping_) changed_.Wait(mu_);
      if (current_ == nullptr) return;
      stream = current_;
    }
    absl::Status status = ServeGuarded(*stream);
    if (status.ok()) status = stream->end_status();
    spdlog::info("stream ended: {}", status.ToString());
    stream->EndReads(status);
    stream->Close(status);
    MutexLock lock(mu_);
    leave_alarm_.reset();
    current_ = std::move(next_);
    next_ = nullptr;
  }
}

// Running out of memory in the middle of a plan ends the group and not the process.
absl::Status WorkerService::ServeGuarded(CoordinatorStream& stream) {
  try {
    return serve_(stream);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory on the worker");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("unexpected exception on the worker: ", e.what()));
  }
}

void WorkerService::Shutdown() {
  std::deque<std::shared_ptr<Stream>> unproven;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    unproven = unproven_;
    for (const auto& stream : {current_, next_}) {
      if (stream != nullptr) {
        stream->EndReads(absl::UnavailableError("the worker is shutting down"));
      }
    }
    changed_.NotifyAll();
  }
  for (const auto& stream : unproven) {
    stream->EndUnproven(absl::UnavailableError("the worker is shutting down"));
  }
  if (engine_thread_.joinable()) engine_thread_.join();
}

}  // namespace kvasir::worker
