// Certificate, key and CA of one end of TLS connections: read from PEM files and checked whether
// they can serve together, before a peer finds out that they cannot. It hides OpenSSL's parsing and
// the protocol settings of our servers: TLS 1.2 at least, ephemeral keys and AEAD ciphers, no
// resumed sessions (one would outlive the certificate that it was made with). Pure functions.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

struct ssl_ctx_st;

namespace kvasir::proto {

enum class TlsEnd { kServer, kClient };

// Files in PEM form; an empty path: none. `ca` holds the CAs by which the peer is judged.
struct TlsPaths {
  std::string certificate;  // of this end, followed by those between it and its CA
  std::string key;
  std::string ca;
};

struct TlsMaterial {
  std::string certificate;
  std::string key;
  std::string ca;
  // The earliest end of a certificate in `certificate`, and of one in `ca`.
  absl::Time expires = absl::InfiniteFuture();
  absl::Time ca_expires = absl::InfiniteFuture();
  // Context of a server's HTTP connections, which agree on HTTP/1.1 by ALPN. With `ca` a client
  // must present a certificate. gRPC makes its own of the texts.
  std::shared_ptr<ssl_ctx_st> context;
};

// INVALID_ARGUMENT, with flag, file and what to change, for: a file that cannot be read or parsed;
// a key that does not belong to the certificate, is encrypted, or may be read by others than its
// owner and group; a certificate without key or the reverse; one that has expired, is not valid
// yet, or is not for servers where this end is one.
absl::StatusOr<TlsMaterial> ReadTlsMaterial(const TlsPaths& paths, TlsEnd end);

// Says in words why a handshake failed. `error` is of OpenSSL's queue.
std::string DescribeTlsError(unsigned long error);

}  // namespace kvasir::proto
