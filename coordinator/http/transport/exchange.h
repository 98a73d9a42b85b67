// One HTTP request and the way to answer it: the door between connections and handlers. Handlers
// run on a thread of the server, must not block it, and answer once, on any thread and at any time.
// An exchange is thread-safe, and calls after its client has gone do nothing.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "coordinator/security/caller.h"
#include "coordinator/time/clock.h"

namespace kvasir::coordinator {

struct HttpRequest {
  std::string method = {};
  std::string path = {};  // without the query
  std::string body = {};
  std::string request_id = {};     // of the header x-request-id, or one that the server made
  std::string traceparent = {};    // of the W3C header; empty when there is none
  std::string authorization = {};  // of the header; empty when there is none
  std::string last_event_id = {};  // likewise
  TimePoint arrived = {};          // complete
};

struct HttpReply {
  int status = 200;
  std::string body = {};
  std::string content_type = "application/json";
  std::optional<absl::Duration> retry_after = {};
  std::string allow = {};  // methods that would be served, with status 405
  // Further headers: names and values, one line each.
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// The body of an answer that is streamed. Its text is asked for when the client has taken what came
// before, so that what waits for a slow client waits in the source, which bounds it.
class StreamSource {
 public:
  struct Piece {
    std::string text;   // may be empty: nothing is ready
    bool last = false;  // the answer ends with this piece
  };
  virtual ~StreamSource() = default;
  // Called by one thread at a time, never after the last piece.
  virtual Piece Take() = 0;
};

class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual const HttpRequest& request() const = 0;
  // Sets whose key the request has; null, as at first, on a server without API keys. Called before
  // the exchange is handed on.
  virtual void set_caller(std::shared_ptr<const Caller> caller) = 0;
  virtual const std::shared_ptr<const Caller>& caller() const = 0;
  // Moves out the body, for handlers that keep it no longer than they need it. Called once.
  virtual std::string TakeBody() = 0;
  // Sets the function called once, on any thread, when the client is gone or takes nothing for the
  // server's client timeout. Called at once when that has happened already.
  virtual void set_on_gone(std::function<void(const absl::Status&)> on_gone) = 0;

  // Answers: as a whole, with what `source` gives, or with an error in place of what was asked. One
  // of them is called, once. The server is told of errors (HttpServerOptions::on_refusal).
  virtual void Reply(HttpReply reply) = 0;
  virtual void Refuse(const absl::Status& why) = 0;
  virtual void Stream(std::shared_ptr<StreamSource> source, std::string content_type) = 0;
  // Does `work` on a thread of the server, also when the client is gone.
  virtual void Run(std::function<void()> work) = 0;
  // Says that the source of Stream has a piece.
  virtual void Wake() = 0;
  // Cuts the client off.
  virtual void Drop(const absl::Status& why) = 0;
};

// A request that was answered with an error. Of one that cannot be read only its id is known.
struct HttpRefusal {
  const HttpRequest& request;
  const std::shared_ptr<const Caller>& caller;
  const absl::Status& why;
};

using HttpHandler = std::function<void(std::shared_ptr<Exchange> exchange)>;

}  // namespace kvasir::coordinator
