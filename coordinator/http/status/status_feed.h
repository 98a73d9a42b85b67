// GET /status/events: the server's state as a stream of server-sent events, one at once and then
// one a second. Each event is written once, on a thread of its own that starts with the first
// listener and sleeps while nobody listens, and only the newest one waits for a client that is
// slow. Made by the HTTP front. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"

#include "coordinator/http/transport/exchange.h"
#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

class StatusFeed {
 public:
  static constexpr size_t kMostListeners = 16;
  static constexpr absl::Duration kInterval = absl::Seconds(1);

  // `tell` returns the data of an event, one line. It is called on the feed's thread. `clock`
  // outlives the feed.
  StatusFeed(std::function<std::string()> tell, Clock& clock);
  ~StatusFeed();  // calls Stop. REQUIRES: the server's connections take nothing any more

  // Answers with the stream; 429 when kMostListeners listen.
  void Listen(std::shared_ptr<Exchange> exchange) EXCLUDES(mu_);
  // Ends the streams. Afterwards Listen answers 503.
  void Stop() EXCLUDES(mu_);

 private:
  class Listener;
  struct Event {
    int64_t number = 0;  // from 1
    std::string text;
  };

  void Run() EXCLUDES(mu_);
  // Returns false when the feed stops, otherwise when somebody listens and an event is due.
  bool AwaitNext() EXCLUDES(mu_);
  absl::Status Add(const std::shared_ptr<Exchange>& exchange, std::shared_ptr<Listener>& added)
      EXCLUDES(mu_);
  void Remove(const Listener* listener) EXCLUDES(mu_);
  std::vector<std::shared_ptr<Exchange>> Listeners() REQUIRES(mu_);

  const std::function<std::string()> tell_;
  Clock& clock_;

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::map<const Listener*, std::shared_ptr<Exchange>> listeners_ GUARDED_BY(mu_);
  std::shared_ptr<const Event> newest_ GUARDED_BY(mu_);  // null while nobody listens
  int64_t told_ GUARDED_BY(mu_) = 0;                     // number of events
  TimePoint due_ GUARDED_BY(mu_) = {};                   // of the next event
  bool stopping_ GUARDED_BY(mu_) = false;
  std::thread thread_ GUARDED_BY(mu_);  // last: it uses everything above
};

}  // namespace kvasir::coordinator
