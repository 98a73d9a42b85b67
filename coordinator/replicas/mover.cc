#include "coordinator/replicas/mover.h"

#include <utility>
#include <vector>

#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

using kernels::MutexLock;

absl::StatusOr<std::unique_ptr<Mover>> Mover::Create(const v1::ServeConfig& config,
                                                     const v1::TlsClientConfig& tls, Clock& clock,
                                                     Metrics& metrics) {
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<ReplicaServers> servers,
      ReplicaServers::Create("--replica-servers", config.replica_servers(), tls));
  if (config.drain() != "move") return nullptr;
  if (servers->size() == 0) {
    return absl::InvalidArgumentError(
        "--drain=move needs --replica-servers, which go on with the requests");
  }
  return std::unique_ptr<Mover>(new Mover(std::move(servers), clock, metrics));
}

Mover::~Mover() { KVASIR_CHECK(num_answers() == 0); }

std::shared_ptr<MovableAnswer> Mover::MakeAnswer(std::shared_ptr<ClientSink> client) {
  MutexLock lock(mu_);
  const int64_t id = next_++;
  const std::shared_ptr<MovableAnswer> answer(
      new MovableAnswer({.servers = *servers_,
                         .on_move = [this](MovableAnswer::Outcome outcome) { OnMove(outcome); }},
                        std::move(client)),
      [this, id](MovableAnswer* ended) {
        delete ended;
        Remove(id);
      });
  answers_[id] = answer;
  return answer;
}

void Mover::Remove(int64_t id) {
  MutexLock lock(mu_);
  answers_.erase(id);
  changed_.NotifyAll();
}

void Mover::OnMove(MovableAnswer::Outcome outcome) {
  metrics_.RequestMoved(outcome == MovableAnswer::Outcome::kMoved   ? Metrics::Move::kMoved
                        : outcome == MovableAnswer::Outcome::kStays ? Metrics::Move::kStays
                                                                    : Metrics::Move::kLost);
}

void Mover::MoveAll() {
  std::vector<std::shared_ptr<MovableAnswer>> answers;
  {
    MutexLock lock(mu_);
    for (const auto& [id, weak] : answers_) {
      if (std::shared_ptr<MovableAnswer> answer = weak.lock()) answers.push_back(std::move(answer));
    }
  }
  spdlog::info("{} requests move to {} other servers", answers.size(), servers_->size());
  for (size_t i = 0; i < answers.size(); ++i) answers[i]->Move(i % servers_->size());
}

int64_t Mover::num_answers() const {
  MutexLock lock(mu_);
  return std::ssize(answers_);
}

bool Mover::WaitUntilNone(TimePoint deadline) {
  MutexLock lock(mu_);
  while (!answers_.empty() && clock_.Now() < deadline) clock_.Wait(mu_, changed_, deadline);
  return answers_.empty();
}

void Mover::Stop(const absl::Status& why) {
  std::vector<std::shared_ptr<MovableAnswer>> answers;
  {
    MutexLock lock(mu_);
    for (const auto& [id, weak] : answers_) {
      if (std::shared_ptr<MovableAnswer> answer = weak.lock()) answers.push_back(std::move(answer));
    }
  }
  for (const std::shared_ptr<MovableAnswer>& answer : answers) answer->Abandon(why);
  answers.clear();
  MutexLock lock(mu_);
  while (!answers_.empty()) changed_.Wait(mu_);
}

}  // namespace kvasir::coordinator
