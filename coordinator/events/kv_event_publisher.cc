#include "coordinator/events/kv_event_publisher.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "spdlog/spdlog.h"

#include "coordinator/events/event_batch.h"
#include "kernels/base/mutex.h"
#include "proto/process/named_thread.h"
#include "zmq.hpp"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

// Longest time between an event and its message.
constexpr std::chrono::milliseconds kPause{20};
// The last batches are kept for replay, within both bounds.
constexpr size_t kMostBatches = 10000;
constexpr size_t kMostBytes = 64 << 20;
constexpr int64_t kEndOfReplay = -1;
// Messages that wait for a slow subscriber; further ones are dropped, and it asks for a replay.
constexpr int kHighWaterMark = 10000;

std::array<char, 8> BigEndian(int64_t number) {
  std::array<char, 8> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(static_cast<uint64_t>(number) >> (8 * (bytes.size() - 1 - i)));
  }
  return bytes;
}

int64_t FromBigEndian(const char* bytes) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(number); ++i) {
    number = number << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return static_cast<int64_t>(number);
}

struct Sent {
  int64_t number;
  std::string batch;
};

class KvEventPublisherImpl final : public KvEventPublisher {
 public:
  explicit KvEventPublisherImpl(std::string topic) : topic_(std::move(topic)) {}
  ~KvEventPublisherImpl() override {
    {
      MutexLock lock(mu_);
      stopping_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }

  // Throws zmq::error_t.
  void Bind(const KvEventOptions& options) {
    publisher_.set(zmq::sockopt::sndhwm, kHighWaterMark);
    publisher_.set(zmq::sockopt::linger, 0);
    publisher_.bind(options.endpoint);
    if (options.replay_endpoint.empty()) return;
    replay_.set(zmq::sockopt::sndhwm, kHighWaterMark);
    replay_.set(zmq::sockopt::linger, 0);
    replay_.bind(options.replay_endpoint);
    replay_endpoint_ = replay_.get(zmq::sockopt::last_endpoint);
  }
  void Run() {
    endpoint_ = publisher_.get(zmq::sockopt::last_endpoint);
    thread_ = proto::NamedThread("kv-events", [this] { Publish(); });
  }

  void Stored(const kvstore::PrefixHash& hash, const kvstore::PrefixHash* parent,
              absl::Span<const int32_t> tokens) override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (!failed_) pending_.AddStored(hash, parent, tokens);
  }
  void Removed(const kvstore::PrefixHash& hash) override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (!failed_) pending_.AddRemoved(hash);
  }
  void Cleared() override EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (!failed_) pending_.AddCleared();
  }
  std::string endpoint() const override { return endpoint_; }
  std::string replay_endpoint() const override { return replay_endpoint_; }

 private:
  // The thread: no exception of ZeroMQ leaves it.
  void Publish() EXCLUDES(mu_) {
    try {
      while (true) {
        bool stop = false;
        EventBatch batch;
        {
          MutexLock lock(mu_);
          stop = stopping_;
          batch = std::exchange(pending_, {});
        }
        if (!batch.empty())
          Send(batch.Encode(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch())));
        if (stop) return;
        zmq::pollitem_t asked = {replay_, 0, ZMQ_POLLIN, 0};
        zmq::poll(&asked, 1, kPause);
        if ((asked.revents & ZMQ_POLLIN) != 0) Replay();
      }
    } catch (const zmq::error_t& error) {
      spdlog::error("KV events are not published any more: {}", error.what());
      MutexLock lock(mu_);
      failed_ = true;
      pending_ = {};
    }
  }

  void Send(std::string batch) {
    const int64_t number = next_number_++;
    SendFrames(publisher_, {topic_, Frame(BigEndian(number)), batch});
    kept_bytes_ += batch.size();
    kept_.push_back({number, std::move(batch)});
    while (kept_.size() > kMostBatches || kept_bytes_ > kMostBytes) {
      kept_bytes_ -= kept_.front().batch.size();
      kept_.pop_front();
    }
  }

  // Answers one question; one of another form is ignored.
  void Replay() {
    std::vector<std::string> question;
    zmq::message_t part;
    do {
      if (!replay_.recv(part)) return;
      question.push_back(part.to_string());
    } while (part.more());
    if (question.size() != 3 || question[2].size() != sizeof(int64_t)) return;
    const std::string& asker = question[0];
    const int64_t first = FromBigEndian(question[2].data());
    for (const Sent& sent : kept_) {
      if (sent.number < first) continue;
      SendFrames(replay_, {asker, "", Frame(BigEndian(sent.number)), sent.batch});
    }
    SendFrames(replay_, {asker, "", Frame(BigEndian(kEndOfReplay)), ""});
  }

  static std::string Frame(const std::array<char, 8>& bytes) {
    return std::string(bytes.data(), bytes.size());
  }
  static void SendFrames(zmq::socket_t& socket, const std::vector<std::string>& frames) {
    for (size_t i = 0; i < frames.size(); ++i) {
      const bool last = i + 1 == frames.size();
      socket.send(zmq::buffer(frames[i]), last ? zmq::send_flags::none : zmq::send_flags::sndmore);
    }
  }

  const std::string topic_;
  std::string endpoint_;  // constant after Run, as the next
  std::string replay_endpoint_;

  // The thread's, after Run.
  zmq::context_t context_{1};
  zmq::socket_t publisher_{context_, zmq::socket_type::pub};
  zmq::socket_t replay_{context_, zmq::socket_type::router};
  int64_t next_number_ = 0;
  std::deque<Sent> kept_;
  size_t kept_bytes_ = 0;

  kernels::Mutex mu_;
  EventBatch pending_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  bool failed_ GUARDED_BY(mu_) = false;  // nobody takes events any more
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KvEventPublisher>> KvEventPublisher::Start(
    const KvEventOptions& options) {
  try {
    auto publisher = std::make_unique<KvEventPublisherImpl>(options.topic);
    publisher->Bind(options);
    publisher->Run();
    return publisher;
  } catch (const zmq::error_t& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv-events-endpoint ", options.endpoint, ", --kv-events-replay-endpoint ",
                     options.replay_endpoint.empty() ? "(none)" : options.replay_endpoint, ": ",
                     error.what(), "; expected tcp://HOST:PORT with a free port"));
  }
}

}  // namespace kvasir::coordinator
