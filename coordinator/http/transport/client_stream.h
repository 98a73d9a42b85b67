// The bytes of one HTTP connection, plain or by TLS: an asynchronous stream for Asio and Beast. It
// hides the handshake, what tells a client that speaks the wrong one, and how each is ended. Used
// on the connection's strand.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "boost/asio/ip/tcp.hpp"
#include "boost/asio/ssl/stream.hpp"
#include "proto/security/tls.h"

namespace kvasir::coordinator {

class ClientStream {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using executor_type = Socket::executor_type;  // as Asio's concepts want it

  explicit ClientStream(Socket socket) : socket_(std::move(socket)) {}

  executor_type get_executor() { return socket_.get_executor(); }
  // Begins TLS; with null `tls` the stream is plain and `done` is called at once. Otherwise it is
  // called with: OK; CANCELLED when the client has gone; INVALID_ARGUMENT when it speaks without
  // TLS, and can be answered so; UNAUTHENTICATED, with the reason, when the handshake failed.
  // `done` keeps this object.
  void Accept(const proto::ServerTls* tls, std::function<void(const absl::Status&)> done);

  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (speaks_tls_) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }
  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (speaks_tls_) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

  // Tells the client that nothing follows; `keeper` keeps this object meanwhile. What the client
  // sends can still be read.
  void EndWriting(std::shared_ptr<void> keeper);
  // Ends the read in progress with operation_aborted. REQUIRES: no write is in progress.
  void CancelRead();
  void Close();
  // Returns "ADDRESS:PORT" of the client, for the log.
  std::string peer() const;

 private:
  using ErrorCode = boost::system::error_code;

  void OnFirstBytes(const std::shared_ptr<ssl_ctx_st>& context, size_t count,
                    std::function<void(const absl::Status&)> done);

  Socket socket_;
  std::optional<boost::asio::ssl::stream<Socket&>> tls_;
  bool speaks_tls_ = false;
  std::vector<char> first_;  // received before the handshake; empty after it
};

}  // namespace kvasir::coordinator
