// TLS of our servers and of the connections that we open: one pair of certificate and key, and the
// CA that judges the peer, for gRPC, HTTP and metrics alike. Certificates are read again when their
// files change; connections that are open go on. It hides files, checks (tls_material.h) and how
// gRPC and OpenSSL are given a new certificate. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"

#include "proto/kvasir/v1/config.pb.h"

struct ssl_ctx_st;

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace kvasir::proto {

// The certificate of a server's ports. Its files are looked at twice a second; a new certificate
// that cannot serve is logged, and the one in force stays.
class ServerTls {
 public:
  // Null when `config` has no files: ports are plain. INVALID_ARGUMENT as ReadTlsMaterial.
  static absl::StatusOr<std::shared_ptr<ServerTls>> Load(const v1::TlsServerConfig& config);
  virtual ~ServerTls() = default;
  // Returns what gives a gRPC server's new connections the certificate in force. It keeps this
  // object.
  virtual std::shared_ptr<grpc::ServerCredentials> GrpcCredentials() = 0;
  // Returns OpenSSL's context of new HTTP connections.
  virtual std::shared_ptr<ssl_ctx_st> Context() const = 0;
  // Shows from now on until when the certificates in force serve. Called once; `registry` outlives
  // this object.
  virtual void ExportTo(prometheus::Registry& registry) = 0;
};

// How channels to servers speak: by TLS when `tls_ca_file` is given, and never over unix sockets,
// which the modes of their folders protect.
class ChannelTls {
 public:
  // INVALID_ARGUMENT as ReadTlsMaterial, and for a certificate without --tls-ca-file.
  static absl::StatusOr<std::shared_ptr<ChannelTls>> Load(const v1::TlsClientConfig& config);
  virtual ~ChannelTls() = default;
  // Returns the credentials of a new channel to `address`. Reads files that have changed; where
  // they cannot serve, logs it and returns the credentials of before.
  virtual std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(const std::string& address) = 0;
};

}  // namespace kvasir::proto
