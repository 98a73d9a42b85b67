#include "coordinator/http/transport/client_stream.h"

#include "absl/strings/str_cat.h"

#include "boost/asio/buffer.hpp"
#include "boost/asio/ssl/context.hpp"
#include "boost/asio/ssl/error.hpp"
#include "openssl/ssl.h"
#include "proto/security/tls_material.h"
#include "proto/security/tls_socket.h"

namespace kvasir::coordinator {
namespace {

namespace asio = boost::asio;

// Holds a ClientHello, so that most handshakes begin with one read.
constexpr size_t kFirstBytes = 2048;

absl::Status HandshakeError(const boost::system::error_code& error) {
  if (error.category() != asio::error::get_ssl_category()) {
    return absl::CancelledError("the client is gone");
  }
  return absl::UnauthenticatedError(
      absl::StrCat("a TLS handshake failed: ",
                   proto::DescribeTlsError(static_cast<unsigned long>(error.value()))));
}

}  // namespace

void ClientStream::Accept(const proto::ServerTls* tls,
                          std::function<void(const absl::Status&)> done) {
  if (tls == nullptr) return done(absl::OkStatus());
  first_.resize(kFirstBytes);
  socket_.async_read_some(asio::buffer(first_),
                          [this, context = tls->Context(), done = std::move(done)](
                              const ErrorCode& error, size_t count) mutable {
                            if (error) return done(absl::CancelledError("the client is gone"));
                            OnFirstBytes(context, count, std::move(done));
                          });
}

void ClientStream::OnFirstBytes(const std::shared_ptr<ssl_ctx_st>& context, size_t count,
                                std::function<void(const absl::Status&)> done) {
  if (!proto::BeginsTls(first_.front())) {
    first_ = {};
    return done(absl::InvalidArgumentError("this port speaks TLS; use https://"));
  }
  SSL_CTX_up_ref(context.get());  // Asio's context takes one
  asio::ssl::context of_asio(context.get());
  tls_.emplace(socket_, of_asio);
  tls_->async_handshake(asio::ssl::stream_base::server, asio::buffer(first_.data(), count),
                        [this, done = std::move(done)](const ErrorCode& error, size_t) {
                          first_ = {};
                          speaks_tls_ = !error;
                          done(error ? HandshakeError(error) : absl::OkStatus());
                        });
}

void ClientStream::EndWriting(std::shared_ptr<void> keeper) {
  ErrorCode ignored;
  if (!speaks_tls_) {
    socket_.shutdown(Socket::shutdown_send, ignored);
    return;
  }
  // The client answers this end with its own, which the reader sees.
  tls_->async_shutdown([keeper = std::move(keeper)](const ErrorCode&) {});
}

void ClientStream::CancelRead() {
  ErrorCode ignored;
  socket_.cancel(ignored);
}

void ClientStream::Close() {
  ErrorCode ignored;
  socket_.close(ignored);
}

std::string ClientStream::peer() const {
  ErrorCode ignored;
  const auto endpoint = socket_.remote_endpoint(ignored);
  return absl::StrCat(endpoint.address().to_string(ignored), ":", endpoint.port());
}

}  // namespace kvasir::coordinator
