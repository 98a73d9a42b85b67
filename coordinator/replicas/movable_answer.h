// The way of an answer to its client when it may move to another server: begins as that of a
// request of this server, and on Move goes over to a request of another one, without the client's
// notice.
//
//   here ──Move──▶ preparing ──the other server has told a token──▶ leaving ──closed here──▶ there
//     ▲                │ refused by all servers                        │ it ended by itself
//     └────────────────┘                                               ▼ ended
//
// While it is prepared the answer goes on here: the other server reads prompt and answer so far, as
// blocks that its workers fetch from ours, computes one more token and drops it. Then the request
// ends here and the other server goes on from the last token that the client was told. Made by the
// API for each request of a server that may move them. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"

#include "coordinator/replicas/replica_servers.h"
#include "coordinator/request/client_sink.h"
#include "coordinator/request/response_sink.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class MovableAnswer final : public ResponseSink,
                            public std::enable_shared_from_this<MovableAnswer> {
 public:
  enum class Outcome {
    kMoved,  // the answer comes from another server from now on
    kStays,  // no server takes it
    kLost    // it had moved, and no server goes on with it
  };
  struct Options {
    const ReplicaServers& servers;  // outlives the answer
    // Called once for each move that ends in this way, on any thread.
    std::function<void(Outcome outcome)> on_move;
  };
  MovableAnswer(Options options, std::shared_ptr<ClientSink> client)
      : options_(std::move(options)), client_(std::move(client)) {}

  // Called once, before the first Write. `request`: without what will be told, which the answer
  // adds. `cancel_here` ends this server's request, perhaps at once.
  void Begin(ElsewhereRequest request, std::function<void(const absl::Status&)> cancel_here)
      EXCLUDES(mu_);

  // As ResponseSink, called by the request of this server.
  void Write(v1::GenerateResponse response) override EXCLUDES(mu_);
  void Close(const absl::Status& status) override EXCLUDES(mu_);

  // Moves the answer, soon. `first` is the server that is asked first. Does nothing when the answer
  // has ended or moves already.
  void Move(size_t first) EXCLUDES(mu_);
  // Nobody waits for the answer any more, or it may not go on for the reason `why`. Ends what
  // another server does for it. The request of this server is the caller's.
  void Abandon(const absl::Status& why) EXCLUDES(call_mu_);

 private:
  enum class State { kHere, kPreparing, kLeaving, kThere, kEnded };

  // Each asks the server after the last one that was asked; false when all were.
  bool Prepare() EXCLUDES(mu_, call_mu_);
  bool GoOn() EXCLUDES(mu_, call_mu_);
  void OnPrepared(const absl::Status& status) EXCLUDES(mu_, call_mu_);
  void OnProgressThere() EXCLUDES(mu_);
  void OnEndThere(const absl::Status& status) EXCLUDES(mu_, call_mu_);
  // Remembers what the client is told.
  void Remember(const v1::GenerateResponse& response) EXCLUDES(mu_);
  void Ask(size_t server, ElsewhereRequest request, ReplicaServers::Callbacks callbacks)
      EXCLUDES(call_mu_);
  absl::Status abandoned() EXCLUDES(call_mu_);

  const Options options_;
  const std::shared_ptr<ClientSink> client_;  // written by one server at a time

  kernels::Mutex mu_;
  State state_ GUARDED_BY(mu_) = State::kHere;
  ElsewhereRequest request_ GUARDED_BY(mu_);  // its field `resume` has what was told
  bool may_move_ GUARDED_BY(mu_) = false;
  bool is_finished_ GUARDED_BY(mu_) = false;  // the client has the end of its answer
  std::function<void(const absl::Status&)> cancel_here_ GUARDED_BY(mu_);
  size_t server_ GUARDED_BY(mu_) = 0;  // the one that was asked last
  size_t asked_ GUARDED_BY(mu_) = 0;   // number of servers since the last that told a token

  // Apart, because a client may leave while it is written to.
  kernels::Mutex call_mu_;
  int64_t calls_ GUARDED_BY(call_mu_) = 0;                           // that were begun
  std::shared_ptr<ReplicaServers::Call> call_ GUARDED_BY(call_mu_);  // the last of them
  absl::Status abandoned_ GUARDED_BY(call_mu_);
};

}  // namespace kvasir::coordinator
