// One accepted connection of a server that polls: bytes in and out without blocking, plain or by
// TLS, whose handshake happens within the first reads. It hides OpenSSL. Thread-compatible.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "proto/sockets.h"

struct ssl_ctx_st;
struct ssl_st;

namespace kvasir::proto {

// Returns true for the first byte of a TLS connection, which no request in text has.
constexpr bool BeginsTls(char first) { return first == '\x16'; }

class TlsSocket {
 public:
  enum class Result { kDone, kAgain, kEnded };

  // `socket` does not block. `context` null: plain.
  TlsSocket(Descriptor socket, const std::shared_ptr<ssl_ctx_st>& context);

  int get() const { return socket_.get(); }
  // Read at most, or write a part of, `size` bytes; kDone says in `count` how many. kAgain: poll
  // for `waits_for` and call again. kEnded: the peer has closed, or a handshake failed, of which
  // `failure` tells. `size` > 0.
  Result Read(char* bytes, size_t size, size_t& count);
  Result Write(const char* bytes, size_t size, size_t& count);
  // Tells the peer that nothing follows.
  void EndWriting();

  // POLLIN or POLLOUT, after kAgain.
  short waits_for() const { return waits_for_; }
  // True when a peer that should begin with TLS begins in plain text. Its bytes can be read and
  // written plain.
  bool is_plain_by_mistake() const { return is_plain_by_mistake_; }
  // Why the handshake failed; empty when it did not.
  const std::string& failure() const { return failure_; }

 private:
  struct Free {
    void operator()(ssl_st* ssl) const;
  };

  // Looks at the first byte. kDone: it has come.
  Result LearnKind();
  Result AfterTls(int returned);
  Result AfterSystemCall();

  Descriptor socket_;
  std::unique_ptr<ssl_st, Free> ssl_;  // null: plain
  bool knows_kind_ = false;
  bool is_plain_by_mistake_ = false;
  short waits_for_ = 1;  // POLLIN
  std::string failure_;
};

}  // namespace kvasir::proto
