#include "coordinator/http/transport/connection.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "boost/asio/buffer.hpp"
#include "boost/asio/post.hpp"
#include "boost/asio/write.hpp"
#include "boost/beast/http/read.hpp"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/http/transport/request_id.h"
#include "kernels/base/mutex.h"
#include "proto/grpc_status.h"
#include "proto/security/tls_socket.h"

namespace kvasir::coordinator {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using kernels::MutexLock;

constexpr size_t kMostHeadBytes = size_t{16} << 10;
constexpr size_t kReadBytes = size_t{4} << 10;
constexpr size_t kBodyReadBytes = size_t{64} << 10;
constexpr size_t kWriteBytes = size_t{64} << 10;
// Bytes of further requests that are taken while one is answered.
constexpr size_t kMostPipelinedBytes = size_t{16} << 10;
constexpr absl::Duration kIdleTime = absl::Minutes(1);
constexpr absl::Duration kHeadTime = absl::Seconds(10);
constexpr absl::Duration kBodyTime = absl::Minutes(1);
// Time in which a client may take the last answer of a connection that is about to be closed.
constexpr absl::Duration kLingerTime = absl::Seconds(5);
constexpr absl::Duration kRetry = absl::Seconds(5);

absl::string_view View(boost::beast::string_view text) { return {text.data(), text.size()}; }
absl::Status ClientIsGone() { return absl::CancelledError("the client is gone"); }

}  // namespace

// The exchange keeps its connection, and the connection its exchange until the answer has ended.
class Connection::ConnectionExchange final
    : public Exchange,
      public std::enable_shared_from_this<ConnectionExchange> {
 public:
  ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request)
      : connection_(std::move(connection)), request_(std::move(request)) {}

  const HttpRequest& request() const override { return request_; }
  void set_caller(std::shared_ptr<const Caller> caller) override { caller_ = std::move(caller); }
  const std::shared_ptr<const Caller>& caller() const override { return caller_; }
  std::string TakeBody() override { return std::move(request_.body); }

  void set_on_gone(std::function<void(const absl::Status&)> on_gone) override EXCLUDES(mu_) {
    absl::Status gone;
    std::function<void(const absl::Status&)> callback;
    {
      MutexLock lock(mu_);
      on_gone_ = std::move(on_gone);
      gone = gone_;
      if (!gone.ok()) callback = std::exchange(on_gone_, nullptr);
    }
    if (callback) callback(gone);
  }
  void Gone(const absl::Status& why) EXCLUDES(mu_) {
    std::function<void(const absl::Status&)> callback;
    {
      MutexLock lock(mu_);
      if (!gone_.ok()) return;
      gone_ = why;
      callback = std::exchange(on_gone_, nullptr);
    }
    if (callback) callback(why);
  }
  // Lets go of what the handler gave, when the answer has ended.
  void Forget() EXCLUDES(mu_) {
    std::function<void(const absl::Status&)> forgotten;
    MutexLock lock(mu_);
    forgotten = std::exchange(on_gone_, nullptr);
  }

  void Reply(HttpReply reply) override {
    Post([self = shared_from_this(), reply = std::move(reply)] {
      self->connection_->Reply(*self, reply);
    });
  }
  void Refuse(const absl::Status& why) override {
    connection_->context_.on_refusal({.request = request_, .caller = caller_, .why = why});
    Reply(ErrorReply(why));
  }
  void Stream(std::shared_ptr<StreamSource> source, std::string content_type) override {
    Post([self = shared_from_this(), source = std::move(source),
          content_type = std::move(content_type)] {
      self->connection_->Stream(*self, source, content_type);
    });
  }
  void Run(std::function<void()> work) override { Post(std::move(work)); }
  void Wake() override {
    if (waking_.exchange(true)) return;
    Post([self = shared_from_this()] {
      self->waking_ = false;
      if (self->connection_->exchange_ == self) self->connection_->Pump();
    });
  }
  void Drop(const absl::Status& why) override {
    Post([self = shared_from_this(), why] {
      if (self->connection_->exchange_ == self) self->connection_->Leave(why);
    });
  }

 private:
  template <typename Work>
  void Post(Work work) {
    asio::post(connection_->stream_.get_executor(), std::move(work));
  }

  const std::shared_ptr<Connection> connection_;
  HttpRequest request_;
  std::shared_ptr<const Caller> caller_;
  std::atomic<bool> waking_ = false;
  kernels::Mutex mu_;
  std::function<void(const absl::Status&)> on_gone_ GUARDED_BY(mu_);
  absl::Status gone_ GUARDED_BY(mu_);
};

Connection::Connection(asio::ip::tcp::socket socket, uint64_t id, const ConnectionContext& context)
    : context_(context),
      id_(id),
      stream_(std::move(socket)),
      timer_(stream_.get_executor()),
      buffer_(kMostHeadBytes + kMostPipelinedBytes) {}

void Connection::Start() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    self->Expect(kHeadTime);
    self->stream_.Accept(self->context_.tls,
                         [self](const absl::Status& accepted) { self->OnAccepted(accepted); });
  });
}

void Connection::OnAccepted(const absl::Status& accepted) {
  if (closed_) return;
  if (accepted.ok()) return ReadSome();
  if (absl::IsCancelled(accepted)) return Leave(accepted);
  context_.warnings.Warn(absl::StrCat("refused ", stream_.peer(), ": ", accepted.message()));
  if (absl::IsInvalidArgument(accepted)) return Refuse(accepted);
  Linger();  // the alert that says why is on its way
}

bool Connection::GiveWay() {
  State idle = State::kIdle;
  if (!state_.compare_exchange_strong(idle, State::kClosing)) return false;
  asio::post(stream_.get_executor(), [self = shared_from_this()] { self->Close(); });
  return true;
}

void Connection::Stop() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    self->stopping_ = true;
    self->keep_alive_ = false;
    if (self->exchange_ == nullptr && !self->writing_) self->Close();
  });
}

// --- reading ------------------------------------------------------------------------------------

void Connection::ReadSome() {
  // While too much of further requests waits, only writing tells that the client is gone.
  if (reading_ || closed_ || buffer_.size() + kReadBytes > kMostPipelinedBytes) return;
  reading_ = true;
  stream_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                            self->reading_ = false;
                            self->OnRead(error, bytes);
                          });
}

void Connection::OnRead(const ErrorCode& error, size_t bytes) {
  if (closed_) return;
  if (error == asio::error::operation_aborted) return NextRequest();
  if (error) return Leave(ClientIsGone());
  if (lingering_) return ReadSome();
  buffer_.commit(bytes);
  if (exchange_ == nullptr) return ReadHead();
  ReadSome();
}

void Connection::ReadHead() {
  if (closed_) return;
  if (context_.tls == nullptr &&
      proto::BeginsTls(*static_cast<const char*>(buffer_.data().data()))) {
    return OnAccepted(absl::InvalidArgumentError("this port speaks no TLS; use http://"));
  }
  parser_.emplace();
  parser_->header_limit(kMostHeadBytes);
  parser_->body_limit(context_.most_body_bytes);
  Expect(kHeadTime);
  http::async_read_header(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnHead(error); });
}

void Connection::OnHead(const ErrorCode& error) {
  if (closed_) return;
  const auto& head = parser_->get();
  chunked_ = head.version() >= 11;
  keep_alive_ = !stopping_ && !error && head.keep_alive();
  if (error) return RefuseUnreadable(error);
  Expect(kBodyTime);
  share_ = std::make_unique<BodyBudget::Share>(context_.budget);
  body_.clear();
  if (head[http::field::expect] == "100-continue" && !parser_->is_done()) {
    out_ = "HTTP/1.1 100 Continue\r\n\r\n";
    asio::async_write(stream_, asio::buffer(out_),
                      [self = shared_from_this()](const ErrorCode& failed, size_t) {
                        if (failed) return self->Leave(ClientIsGone());
                        self->ReadBody();
                      });
    return;
  }
  ReadBody();
}

void Connection::ReadBody() {
  if (closed_) return;
  if (parser_->is_done()) return Dispatch();
  if (!share_->GrowTo(body_.size() + kBodyReadBytes)) {
    return Refuse(proto::WithRetryDelay(
        absl::ResourceExhaustedError("as many bodies arrive as there is memory for"), kRetry));
  }
  const size_t had = body_.size();
  body_.resize(had + kBodyReadBytes);
  parser_->get().body().data = body_.data() + had;
  parser_->get().body().size = kBodyReadBytes;
  http::async_read(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnBody(error); });
}

void Connection::OnBody(const ErrorCode& error) {
  if (closed_) return;
  body_.resize(body_.size() - parser_->get().body().size);
  if (!error || error == http::error::need_buffer) return ReadBody();
  RefuseUnreadable(error);
}

void Connection::RefuseUnreadable(const ErrorCode& error) {
  const bool gone = error == http::error::end_of_stream || error == http::error::partial_message ||
                    error.category() != http::make_error_code(http::error::bad_value).category();
  if (gone) return Leave(ClientIsGone());
  if (error == http::error::body_limit) {
    return Refuse(absl::OutOfRangeError(absl::StrCat(
        "the body has more than ", context_.most_body_bytes, " bytes, the most that are taken")));
  }
  Refuse(absl::InvalidArgumentError(absl::StrCat("not a request of HTTP/1.1: ", error.message())));
}

void Connection::Dispatch() {
  ExpectNothing();
  State idle = State::kIdle;
  if (!state_.compare_exchange_strong(idle, State::kBusy)) return Close();
  const auto& head = parser_->get();
  const absl::string_view target = View(head.target());
  HttpRequest request = {.method = std::string(View(head.method_string())),
                         .path = std::string(target.substr(0, target.find('?'))),
                         .body = std::exchange(body_, {}),
                         .request_id = std::string(View(head["x-request-id"])),
                         .traceparent = std::string(View(head["traceparent"])),
                         .authorization = std::string(View(head["authorization"])),
                         .last_event_id = std::string(View(head["last-event-id"])),
                         .arrived = std::chrono::steady_clock::now()};
  share_ = nullptr;  // from here on the handler bounds it
  const absl::Status id = CheckRequestId(request.request_id);
  if (!id.ok() || request.request_id.empty()) request.request_id = context_.new_request_id();
  parser_.reset();
  answered_ = false;
  exchange_ = std::make_shared<ConnectionExchange>(shared_from_this(), std::move(request));
  ReadSome();
  if (!id.ok()) return exchange_->Refuse(id);
  context_.handler(exchange_);
}

// --- answering ----------------------------------------------------------------------------------

std::string Connection::Head(int status, absl::string_view content_type,
                             absl::string_view request_id, absl::string_view more) const {
  return absl::StrCat("HTTP/1.1 ", status, " ",
                      View(http::obsolete_reason(static_cast<http::status>(status))),
                      "\r\nContent-Type: ", content_type, "\r\nx-request-id: ", request_id, "\r\n",
                      more, "Connection: ", keep_alive_ ? "keep-alive" : "close", "\r\n\r\n");
}

std::string Connection::Whole(const HttpReply& reply, const HttpRequest& request) const {
  std::string more = absl::StrCat("Content-Length: ", reply.body.size(), "\r\n");
  if (reply.retry_after.has_value()) {
    const absl::Duration seconds = absl::Ceil(*reply.retry_after, absl::Seconds(1));
    absl::StrAppend(&more, "Retry-After: ", std::max<int64_t>(1, absl::ToInt64Seconds(seconds)),
                    "\r\n");
  }
  if (!reply.allow.empty()) absl::StrAppend(&more, "Allow: ", reply.allow, "\r\n");
  if (reply.status == 401) absl::StrAppend(&more, "WWW-Authenticate: Bearer\r\n");
  for (const auto& [name, value] : reply.headers) absl::StrAppend(&more, name, ": ", value, "\r\n");
  return absl::StrCat(Head(reply.status, reply.content_type, request.request_id, more),
                      request.method == "HEAD" ? absl::string_view() : reply.body);
}

void Connection::Reply(const ConnectionExchange& exchange, const HttpReply& reply) {
  if (exchange_.get() != &exchange || std::exchange(answered_, true)) return;
  context_.on_answer(reply.status);
  Write(Whole(reply, exchange.request()));
}

void Connection::Stream(const ConnectionExchange& exchange, std::shared_ptr<StreamSource> source,
                        absl::string_view content_type) {
  if (exchange_.get() != &exchange || std::exchange(answered_, true)) return;
  context_.on_answer(200);
  if (!chunked_) keep_alive_ = false;  // the end of the connection is the end of the answer
  source_ = std::move(source);
  source_ended_ = false;
  Write(Head(200, content_type, exchange.request().request_id,
             absl::StrCat("Cache-Control: no-store\r\n",
                          chunked_ ? "Transfer-Encoding: chunked\r\n" : "")));
}

void Connection::Pump() {
  if (writing_ || source_ == nullptr || closed_) return;
  if (source_ended_) return EndAnswer();
  StreamSource::Piece piece = source_->Take();
  source_ended_ = piece.last;
  if (chunked_) {
    if (!piece.text.empty()) {
      piece.text = absl::StrCat(absl::Hex(piece.text.size()), "\r\n", piece.text, "\r\n");
    }
    if (piece.last) absl::StrAppend(&piece.text, "0\r\n\r\n");
  }
  if (!piece.text.empty()) return Write(std::move(piece.text));
  if (piece.last) EndAnswer();
}

void Connection::Write(std::string text) {
  out_ = std::move(text);
  written_ = 0;
  writing_ = true;
  WriteMore();
}

void Connection::WriteMore() {
  if (closed_) return;
  if (written_ == out_.size()) return OnWritten();
  Expect(lingering_ ? kLingerTime : context_.client_timeout);
  const size_t bytes = std::min(out_.size() - written_, kWriteBytes);
  stream_.async_write_some(asio::buffer(out_.data() + written_, bytes),
                           [self = shared_from_this()](const ErrorCode& error, size_t written) {
                             if (error) return self->Leave(ClientIsGone());
                             self->written_ += written;
                             self->WriteMore();
                           });
}

void Connection::OnWritten() {
  writing_ = false;
  out_ = {};
  ExpectNothing();
  if (source_ != nullptr) return Pump();
  EndAnswer();
}

void Connection::EndAnswer() {
  if (exchange_ != nullptr) exchange_->Forget();
  exchange_ = nullptr;
  source_ = nullptr;
  if (stopping_) return Close();
  if (!keep_alive_) {
    State busy = State::kBusy;
    state_.compare_exchange_strong(busy, State::kIdle);
    return Linger();
  }
  State busy = State::kBusy;
  if (!state_.compare_exchange_strong(busy, State::kIdle)) return Close();
  if (!reading_) return NextRequest();
  // The read in progress waits for the next request, unless that has come already.
  Expect(kIdleTime);
  if (buffer_.size() > 0) stream_.CancelRead();
}

void Connection::Linger() {
  lingering_ = true;
  share_ = nullptr;
  body_ = {};
  stream_.EndWriting(shared_from_this());
  Expect(kLingerTime);
  buffer_.consume(buffer_.size());
  ReadSome();
}

void Connection::NextRequest() {
  if (buffer_.size() > 0) return ReadHead();
  Expect(kIdleTime);
  ReadSome();
}

void Connection::Refuse(const absl::Status& why) {
  keep_alive_ = false;
  const std::string method(parser_.has_value() ? View(parser_->get().method_string()) : "");
  const HttpRequest unread = {.method = method, .request_id = context_.new_request_id()};
  context_.on_refusal({.request = unread, .caller = nullptr, .why = why});
  const HttpReply reply = ErrorReply(why);
  context_.on_answer(reply.status);
  Write(Whole(reply, unread));
}

// --- deadlines and the end ----------------------------------------------------------------------

void Connection::Expect(absl::Duration time) {
  timer_.expires_after(absl::ToChronoNanoseconds(time));
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (!error) self->OnDeadline();
  });
}

void Connection::ExpectNothing() { timer_.expires_at(asio::steady_timer::time_point::max()); }

void Connection::OnDeadline() {
  // A deadline that was moved while its handler waited to run has not passed.
  if (closed_ || timer_.expiry() > std::chrono::steady_clock::now()) return;
  Leave(absl::UnavailableError(absl::StrCat("the client took nothing of its answer for ",
                                            absl::FormatDuration(context_.client_timeout))));
}

void Connection::Leave(const absl::Status& why) {
  const std::shared_ptr<ConnectionExchange> exchange = exchange_;
  Close();
  if (exchange != nullptr) exchange->Gone(why);
}

void Connection::Close() {
  if (std::exchange(closed_, true)) return;
  state_ = State::kClosing;
  stream_.Close();
  timer_.cancel();
  exchange_ = nullptr;
  source_ = nullptr;
  share_ = nullptr;
  context_.on_closed(id_);
}

}  // namespace kvasir::coordinator
