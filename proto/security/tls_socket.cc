#include "proto/security/tls_socket.h"

#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include "openssl/err.h"
#include "openssl/ssl.h"
#include "proto/security/tls_material.h"

namespace kvasir::proto {

void TlsSocket::Free::operator()(ssl_st* ssl) const { SSL_free(ssl); }

TlsSocket::TlsSocket(Descriptor socket, const std::shared_ptr<ssl_ctx_st>& context)
    : socket_(std::move(socket)), knows_kind_(context == nullptr) {
  if (context == nullptr) return;
  ssl_.reset(SSL_new(context.get()));
  if (ssl_ == nullptr || SSL_set_fd(ssl_.get(), socket_.get()) != 1) {
    socket_.Close();  // no memory: every call ends the connection
    return;
  }
  SSL_set_accept_state(ssl_.get());
}

TlsSocket::Result TlsSocket::LearnKind() {
  if (knows_kind_) return Result::kDone;
  char first = 0;
  const ssize_t count = recv(socket_.get(), &first, 1, MSG_PEEK);
  if (count <= 0) return count == 0 ? Result::kEnded : AfterSystemCall();
  knows_kind_ = true;
  is_plain_by_mistake_ = !BeginsTls(first);
  if (is_plain_by_mistake_) ssl_.reset();
  return Result::kDone;
}

TlsSocket::Result TlsSocket::AfterSystemCall() {
  return errno == EAGAIN || errno == EINTR ? Result::kAgain : Result::kEnded;
}

TlsSocket::Result TlsSocket::AfterTls(int returned) {
  switch (SSL_get_error(ssl_.get(), returned)) {
    case SSL_ERROR_WANT_READ:
      waits_for_ = POLLIN;
      return Result::kAgain;
    case SSL_ERROR_WANT_WRITE:
      waits_for_ = POLLOUT;
      return Result::kAgain;
    case SSL_ERROR_SSL:
      if (!SSL_is_init_finished(ssl_.get())) failure_ = DescribeTlsError(ERR_peek_error());
      return Result::kEnded;
    default:
      return Result::kEnded;
  }
}

TlsSocket::Result TlsSocket::Read(char* bytes, size_t size, size_t& count) {
  waits_for_ = POLLIN;
  count = 0;
  if (const Result kind = LearnKind(); kind != Result::kDone) return kind;
  if (ssl_ == nullptr) {
    const ssize_t received = recv(socket_.get(), bytes, size, 0);
    if (received < 0) return AfterSystemCall();
    count = static_cast<size_t>(received);
    return received == 0 ? Result::kEnded : Result::kDone;
  }
  ERR_clear_error();
  const int done = SSL_read_ex(ssl_.get(), bytes, size, &count);
  return done == 1 ? Result::kDone : AfterTls(done);
}

TlsSocket::Result TlsSocket::Write(const char* bytes, size_t size, size_t& count) {
  waits_for_ = POLLOUT;
  count = 0;
  if (ssl_ == nullptr) {
    const ssize_t sent = send(socket_.get(), bytes, size, MSG_NOSIGNAL);
    if (sent < 0) return AfterSystemCall();
    count = static_cast<size_t>(sent);
    return Result::kDone;
  }
  ERR_clear_error();
  const int done = SSL_write_ex(ssl_.get(), bytes, size, &count);
  return done == 1 ? Result::kDone : AfterTls(done);
}

void TlsSocket::EndWriting() {
  ERR_clear_error();
  if (ssl_ != nullptr && SSL_is_init_finished(ssl_.get())) SSL_shutdown(ssl_.get());
  shutdown(socket_.get(), SHUT_WR);
}

}  // namespace kvasir::proto
