// One HTTP/1.1 connection: reads a request, hands it to the handler as an Exchange, writes the
// answer, and goes on to the next request. Hidden: the protocol, deadlines, and how a client that
// is gone is noticed while its answer is being made. The limits are in http_server.h.
//
// All work of a connection runs on its strand; methods marked "any thread" may be called elsewhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "boost/asio/ip/tcp.hpp"
#include "boost/asio/steady_timer.hpp"
#include "boost/beast/core/flat_buffer.hpp"
#include "boost/beast/http/buffer_body.hpp"
#include "boost/beast/http/parser.hpp"
#include "coordinator/http/transport/body_budget.h"
#include "coordinator/http/transport/client_stream.h"
#include "coordinator/http/transport/exchange.h"
#include "proto/process/rare_warnings.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

// Parts of the server that its connections use; they outlive them.
struct ConnectionContext {
  const HttpHandler& handler;
  BodyBudget& budget;
  absl::Duration client_timeout;
  size_t most_body_bytes;
  // Called once, on any thread, when the connection has closed.
  std::function<void(uint64_t id)> on_closed;
  const std::function<std::string()>& new_request_id;
  const std::function<void(const HttpRefusal&)>& on_refusal;
  // Called with the status of every answer.
  std::function<void(int status)> on_answer;
  const proto::ServerTls* tls;  // null: plain
  proto::RareWarnings& warnings;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(boost::asio::ip::tcp::socket socket, uint64_t id, const ConnectionContext& context);

  // Any thread.
  void Start();
  // Closes the connection if no complete request is being answered; returns false otherwise. Any
  // thread.
  bool GiveWay();
  // Ends the connection: at once, or after the answer in progress. Any thread.
  void Stop();

 private:
  class ConnectionExchange;
  using ErrorCode = boost::system::error_code;
  using Parser = boost::beast::http::parser</*isRequest=*/true, boost::beast::http::buffer_body>;
  enum class State { kIdle, kBusy, kClosing };

  // After the handshake, if there is one, with the status that ClientStream::Accept gives; also
  // with INVALID_ARGUMENT for a client that speaks TLS to a plain port.
  void OnAccepted(const absl::Status& accepted);
  // Reading. ReadSome waits for bytes of the next request and learns when the client goes.
  void ReadSome();
  void OnRead(const ErrorCode& error, size_t bytes);
  void ReadHead();
  void OnHead(const ErrorCode& error);
  void ReadBody();
  void OnBody(const ErrorCode& error);
  void Dispatch();

  // Answering.
  void Reply(const ConnectionExchange& exchange, const HttpReply& reply);
  void Stream(const ConnectionExchange& exchange, std::shared_ptr<StreamSource> source,
              absl::string_view content_type);
  void Pump();
  void Write(std::string text);
  void WriteMore();
  void OnWritten();
  void EndAnswer();
  // Goes on to the request that has come, or waits for one.
  void NextRequest();
  // Answers, or leaves, after an error of reading a request.
  void RefuseUnreadable(const ErrorCode& error);
  // Answers a request that cannot be read on, and ends the connection.
  void Refuse(const absl::Status& why);
  // Without the body for a request of method HEAD.
  std::string Whole(const HttpReply& reply, const HttpRequest& request) const;
  std::string Head(int status, absl::string_view content_type, absl::string_view request_id,
                   absl::string_view more) const;

  // Throws away what still comes until the client closes: closing at once would take the answer
  // away from a client that still sends.
  void Linger();
  // Closes the connection when nothing happens for `time`.
  void Expect(absl::Duration time);
  void ExpectNothing();
  void OnDeadline();
  // Takes the client for gone and closes.
  void Leave(const absl::Status& why);
  void Close();

  const ConnectionContext& context_;
  const uint64_t id_;
  std::atomic<State> state_ = State::kIdle;

  // The strand's.
  ClientStream stream_;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer buffer_;  // received and not yet parsed
  std::optional<Parser> parser_;
  std::string body_;
  std::unique_ptr<BodyBudget::Share> share_;
  bool reading_ = false;    // ReadSome is in progress
  bool lingering_ = false;  // the last answer is written: what still comes is thrown away
  bool closed_ = false;
  bool stopping_ = false;
  bool keep_alive_ = true;
  bool chunked_ = true;                           // the client knows chunks: HTTP/1.1
  std::shared_ptr<ConnectionExchange> exchange_;  // of the request that is being answered
  bool answered_ = false;                         // Reply or Stream was called
  std::shared_ptr<StreamSource> source_;
  bool source_ended_ = false;
  std::string out_;     // being written
  size_t written_ = 0;  // part of it
  bool writing_ = false;
};

}  // namespace kvasir::coordinator
