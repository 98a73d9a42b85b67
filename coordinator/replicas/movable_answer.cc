#include "coordinator/replicas/movable_answer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace kvasir::coordinator {

using kernels::MutexLock;

void MovableAnswer::Begin(ElsewhereRequest request,
                          std::function<void(const absl::Status&)> cancel_here) {
  MutexLock lock(mu_);
  request_ = std::move(request);
  cancel_here_ = std::move(cancel_here);
  may_move_ = true;
}

// --- the request of this server -----------------------------------------------------------------

void MovableAnswer::Remember(const v1::GenerateResponse& response) {
  MutexLock lock(mu_);
  if (response.has_finish()) is_finished_ = true;
  if (response.has_tokens()) {
    request_.request.mutable_resume()->mutable_token_ids()->MergeFrom(
        response.tokens().token_ids());
    // From here on it is known that the log probabilities of the prompt were told.
    request_.request.mutable_sampling()->clear_prompt_logprobs();
  }
}

void MovableAnswer::Write(v1::GenerateResponse response) {
  Remember(response);
  client_->Write(std::move(response));
}

void MovableAnswer::Close(const absl::Status& status) {
  bool moves = false;
  {
    MutexLock lock(mu_);
    moves = state_ == State::kLeaving && !status.ok();
    state_ = moves ? State::kThere : State::kEnded;
    asked_ = 0;
  }
  if (moves && abandoned().ok()) {
    options_.on_move(Outcome::kMoved);
    if (GoOn()) return;
  }
  Abandon(absl::CancelledError("the answer has ended"));
  client_->Close(status);
}

// --- moving -------------------------------------------------------------------------------------

void MovableAnswer::Move(size_t first) {
  {
    MutexLock lock(mu_);
    // Half of a prompt's log probabilities cannot be told again.
    const bool scores = request_.request.sampling().has_prompt_logprobs();
    if (state_ != State::kHere || !may_move_ || scores) return;
    state_ = State::kPreparing;
    server_ = first;
    asked_ = 0;
  }
  Prepare();
}

bool MovableAnswer::Prepare() {
  ElsewhereRequest request;
  size_t server = 0;
  {
    MutexLock lock(mu_);
    if (state_ != State::kPreparing || asked_ == options_.servers.size()) return false;
    server = server_ = (server_ + (asked_++ > 0 ? 1 : 0)) % options_.servers.size();
    request = request_;
  }
  // The token shows that the server can go on with the answer.
  request.request = OneTokenOf(std::move(request.request));
  Ask(server, std::move(request),
      {.on_response = [](const v1::GenerateResponse&) {},
       .on_end =
           [self = shared_from_this()](const absl::Status& status) { self->OnPrepared(status); }});
  return true;
}

void MovableAnswer::OnPrepared(const absl::Status& status) {
  if (!abandoned().ok()) return;  // the request of this server ends, and then the answer
  std::function<void(const absl::Status&)> cancel_here;
  std::string address, id;
  {
    MutexLock lock(mu_);
    if (state_ != State::kPreparing) return;
    address = options_.servers.address(server_);
    id = request_.request.request_id();
    if (status.ok()) {
      state_ = State::kLeaving;
      cancel_here = cancel_here_;
    }
  }
  if (status.ok()) {
    cancel_here(absl::CancelledError(absl::StrCat("the request moves to ", address)));
    return;
  }
  spdlog::warn("request {} does not move to {}: {}", id, address, status.ToString());
  if (Prepare()) return;
  {
    MutexLock lock(mu_);
    if (state_ != State::kPreparing) return;
    state_ = State::kHere;
  }
  options_.on_move(Outcome::kStays);
}

// --- the request of another server --------------------------------------------------------------

bool MovableAnswer::GoOn() {
  ElsewhereRequest request;
  size_t server = 0;
  {
    MutexLock lock(mu_);
    if (asked_ == options_.servers.size()) return false;
    server = server_ = (server_ + (asked_++ > 0 ? 1 : 0)) % options_.servers.size();
    request = request_;
  }
  Ask(server, std::move(request),
      {.on_response =
           [self = shared_from_this()](v1::GenerateResponse response) {
             if (response.has_tokens()) self->OnProgressThere();
             self->Remember(response);
             self->client_->Write(std::move(response));
           },
       .on_end =
           [self = shared_from_this()](const absl::Status& status) { self->OnEndThere(status); }});
  return true;
}

void MovableAnswer::OnProgressThere() {
  MutexLock lock(mu_);
  asked_ = 0;
}

void MovableAnswer::OnEndThere(const absl::Status& status) {
  bool is_finished = false;
  std::string address, id;
  {
    MutexLock lock(mu_);
    is_finished = is_finished_;
    address = options_.servers.address(server_);
    id = request_.request.request_id();
  }
  const absl::Status left = abandoned();
  if (!is_finished && left.ok()) {
    spdlog::warn("request {} had moved to {}, which ended it: {}", id, address, status.ToString());
    if (GoOn()) return;
    options_.on_move(Outcome::kLost);
  }
  {
    MutexLock lock(mu_);
    state_ = State::kEnded;
  }
  if (is_finished) {
    client_->Close(absl::OkStatus());
  } else {
    client_->Close(!left.ok() ? left
                              : absl::UnavailableError(absl::StrCat(
                                    "the request had moved to another server, which failed: ",
                                    status.message())));
  }
}

void MovableAnswer::Ask(size_t server, ElsewhereRequest request,
                        ReplicaServers::Callbacks callbacks) {
  int64_t number = 0;
  {
    MutexLock lock(call_mu_);
    number = ++calls_;
  }
  std::shared_ptr<ReplicaServers::Call> call =
      options_.servers.Generate(server, std::move(request), std::move(callbacks));
  {
    MutexLock lock(call_mu_);
    if (number == calls_) call_ = call;  // else it has ended, and another one has begun
    if (abandoned_.ok()) return;
  }
  call->Cancel();  // gRPC may call back at once
}

void MovableAnswer::Abandon(const absl::Status& why) {
  std::shared_ptr<ReplicaServers::Call> call;
  {
    MutexLock lock(call_mu_);
    if (abandoned_.ok()) abandoned_ = why;
    call = call_;
  }
  if (call != nullptr) call->Cancel();
}

absl::Status MovableAnswer::abandoned() {
  MutexLock lock(call_mu_);
  return abandoned_;
}

}  // namespace kvasir::coordinator
