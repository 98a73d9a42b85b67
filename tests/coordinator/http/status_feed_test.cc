#include "coordinator/http/status/status_feed.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "coordinator/http/transport/error_reply.h"
#include "tests/support/fake_clock.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;
using kvasir::testing::FakeClock;

// A client that takes pieces when the test says so. The feed wakes it on a thread of its own.
class Client final : public Exchange {
 public:
  const HttpRequest& request() const override { return request_; }
  void set_caller(std::shared_ptr<const Caller>) override {}
  const std::shared_ptr<const Caller>& caller() const override { return caller_; }
  std::string TakeBody() override { return ""; }
  void set_on_gone(std::function<void(const absl::Status&)> on_gone) override {
    gone_ = std::move(on_gone);
  }
  void Reply(HttpReply reply) override { reply_ = std::move(reply); }
  void Refuse(const absl::Status& why) override { Reply(ErrorReply(why)); }
  void Stream(std::shared_ptr<StreamSource> source, std::string content_type) override {
    source_ = std::move(source);
    content_type_ = std::move(content_type);
  }
  void Run(std::function<void()> work) override { work(); }
  void Wake() override {
    MutexLock lock(mu_);
    ++wakes_;
    woken_.NotifyAll();
  }
  void Drop(const absl::Status&) override {}

  void AwaitWakes(int wakes) {
    MutexLock lock(mu_);
    while (wakes_ < wakes) woken_.Wait(mu_);
  }
  void Leave() { std::exchange(gone_, nullptr)(absl::CancelledError("the client is gone")); }
  StreamSource::Piece Take() { return source_->Take(); }
  bool listens() const { return source_ != nullptr; }
  const HttpReply& reply() const { return reply_; }
  const std::string& content_type() const { return content_type_; }

 private:
  const std::shared_ptr<const Caller> caller_;
  HttpRequest request_;
  HttpReply reply_;
  std::string content_type_;
  std::shared_ptr<StreamSource> source_;
  std::function<void(const absl::Status&)> gone_;
  kernels::Mutex mu_;
  kernels::CondVar woken_;
  int wakes_ GUARDED_BY(mu_) = 0;
};

class StatusFeedTest : public ::testing::Test {
 protected:
  std::shared_ptr<Client> Listen() {
    auto client = std::make_shared<Client>();
    feed_.Listen(client);
    return client;
  }
  // The feed tells one more event and waits for its next time.
  void PassASecond(Client& client, int wakes) {
    clock_.AwaitWaiter();
    clock_.Advance(StatusFeed::kInterval);
    client.AwaitWakes(wakes);
  }

  FakeClock clock_;
  std::atomic<int> told_ = 0;
  StatusFeed feed_{[this] { return absl::StrCat(++told_); }, clock_};
};

TEST_F(StatusFeedTest, TellsAtOnceAndThenOnceASecond) {
  const auto client = Listen();
  EXPECT_EQ(client->content_type(), "text/event-stream");
  client->AwaitWakes(1);
  EXPECT_EQ(client->Take().text, "data: 1\n\n");
  EXPECT_EQ(client->Take().text, "");
  clock_.AwaitWaiter();
  clock_.Advance(StatusFeed::kInterval - absl::Milliseconds(1));
  clock_.AwaitWaiter();
  EXPECT_EQ(client->Take().text, "");
  clock_.Advance(absl::Milliseconds(1));
  client->AwaitWakes(2);
  const StreamSource::Piece second = client->Take();
  EXPECT_EQ(second.text, "data: 2\n\n");
  EXPECT_FALSE(second.last);
}

TEST_F(StatusFeedTest, ASecondListenerHasTheSameEventsAndTheNewestAtOnce) {
  const auto first = Listen();
  first->AwaitWakes(1);
  const auto second = Listen();
  EXPECT_EQ(second->Take().text, "data: 1\n\n");
  PassASecond(*second, 1);
  EXPECT_EQ(second->Take().text, "data: 2\n\n");
  EXPECT_EQ(first->Take().text, "data: 2\n\n");
  EXPECT_EQ(told_, 2);
}

TEST_F(StatusFeedTest, OnlyTheNewestEventWaitsForASlowListener) {
  const auto client = Listen();
  client->AwaitWakes(1);
  for (int wakes = 2; wakes <= 5; ++wakes) PassASecond(*client, wakes);
  EXPECT_EQ(client->Take().text, "data: 5\n\n");
  EXPECT_EQ(client->Take().text, "");
}

TEST_F(StatusFeedTest, NothingIsToldWhileNobodyListensAndWhoComesLaterGetsANewEvent) {
  constexpr int kRounds = 20;
  for (int round = 1; round <= kRounds; ++round) {
    const auto client = Listen();
    std::string taken = client->Take().text;  // nothing, or the new event already
    client->AwaitWakes(1);
    taken += client->Take().text;
    EXPECT_EQ(taken, absl::StrCat("data: ", round, "\n\n"));
    clock_.AwaitWaiter();
    client->Leave();
    clock_.Advance(round % 2 == 0 ? absl::Minutes(1) : absl::Milliseconds(1));
  }
  EXPECT_EQ(told_, kRounds);
}

TEST_F(StatusFeedTest, OneListenerTooManyIsRefusedUntilAnotherLeaves) {
  std::vector<std::shared_ptr<Client>> clients;
  for (size_t i = 0; i < StatusFeed::kMostListeners; ++i) {
    clients.push_back(Listen());
    EXPECT_TRUE(clients.back()->listens());
  }
  const auto refused = Listen();
  EXPECT_FALSE(refused->listens());
  EXPECT_EQ(refused->reply().status, 429);
  EXPECT_TRUE(refused->reply().retry_after.has_value());
  clients.front()->Leave();
  EXPECT_TRUE(Listen()->listens());
}

TEST_F(StatusFeedTest, StopEndsTheStreams) {
  const auto client = Listen();
  client->AwaitWakes(1);
  feed_.Stop();
  client->AwaitWakes(2);
  EXPECT_TRUE(client->Take().last);
  const auto late = Listen();
  EXPECT_FALSE(late->listens());
  EXPECT_EQ(late->reply().status, 503);
}

}  // namespace
}  // namespace kvasir::coordinator
