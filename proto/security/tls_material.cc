#include "proto/security/tls_material.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/status_macros.h"
#include "openssl/bio.h"
#include "openssl/err.h"
#include "openssl/pem.h"
#include "openssl/ssl.h"
#include "openssl/x509v3.h"
#include "proto/sockets.h"

namespace kvasir::proto {
namespace {

constexpr size_t kMostFileBytes = size_t{1} << 20;
constexpr unsigned char kHttp11[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

template <typename Type, void (*Free)(Type*)>
struct Freed {
  void operator()(Type* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Freed<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY, EVP_PKEY_free>>;
using Bytes = std::unique_ptr<BIO, Freed<BIO, BIO_vfree>>;

enum class Readers { kAnybody, kOwnerAndGroup };

// A flag and its file, for messages.
struct Source {
  absl::string_view flag;
  const std::string& path;

  absl::Status Bad(absl::string_view why) const {
    return absl::InvalidArgumentError(absl::StrCat(flag, " ", path, " ", why));
  }
};

absl::StatusOr<std::string> ReadFile(const Source& source, Readers readers) {
  const Descriptor file(open(source.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found = {};
  if (!file.valid() || fstat(file.get(), &found) != 0) {
    return source.Bad(absl::StrCat("cannot be read: ", std::strerror(errno)));
  }
  if (!S_ISREG(found.st_mode)) return source.Bad("is not a file");
  // A group may read it: Kubernetes mounts secrets so.
  if (readers == Readers::kOwnerAndGroup && (found.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return source.Bad("is open to other users; chmod 600 it, and make a new key if they read it");
  }
  std::string text(kMostFileBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = read(file.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return source.Bad(absl::StrCat("cannot be read: ", std::strerror(errno)));
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  if (size > kMostFileBytes) {
    return source.Bad(absl::StrCat("has more than ", kMostFileBytes, " bytes"));
  }
  text.resize(size);
  text.shrink_to_fit();
  return text;
}

Bytes Open(const std::string& text) {
  return Bytes(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

std::string LastError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "unknown error" : reason;
}

// Returns the next certificate of `bytes`, null at their end.
absl::StatusOr<Certificate> Next(const Source& source, BIO* bytes) {
  ERR_clear_error();
  Certificate certificate(PEM_read_bio_X509(bytes, nullptr, nullptr, nullptr));
  if (certificate == nullptr && ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
    return source.Bad(absl::StrCat("holds a certificate that cannot be read: ", LastError()));
  }
  ERR_clear_error();
  return certificate;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts = {};
  ASN1_TIME_to_tm(time, &parts);
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::string Day(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
}

absl::Status CheckLeaf(const Source& source, X509* leaf, TlsEnd end) {
  const absl::Time now = absl::Now();
  const absl::Time since = TimeOf(X509_get0_notBefore(leaf));
  const absl::Time until = TimeOf(X509_get0_notAfter(leaf));
  if (now >= until) {
    return source.Bad(absl::StrCat("expired on ", Day(until), "; renew the certificate"));
  }
  if (now < since) {
    return source.Bad(absl::StrCat("is not valid before ", Day(since), " and this machine has ",
                                   Day(now), "; see its clock"));
  }
  if (end == TlsEnd::kServer && X509_check_purpose(leaf, X509_PURPOSE_SSL_SERVER, 0) != 1) {
    return source.Bad(
        "is not for servers; its extended key usage must have serverAuth, or be absent");
  }
  return absl::OkStatus();
}

absl::Status UseCertificate(const Source& source, TlsEnd end, TlsMaterial& material) {
  const Bytes bytes = Open(material.certificate);
  SSL_CTX* const context = material.context.get();
  KVASIR_ASSIGN_OR_RETURN(const Certificate leaf, Next(source, bytes.get()));
  if (leaf == nullptr) return source.Bad("holds no certificate in PEM form");
  KVASIR_RETURN_IF_ERROR(CheckLeaf(source, leaf.get(), end));
  material.expires = TimeOf(X509_get0_notAfter(leaf.get()));
  if (SSL_CTX_use_certificate(context, leaf.get()) != 1) {
    return source.Bad(absl::StrCat("cannot be used: ", LastError()));
  }
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const Certificate above, Next(source, bytes.get()));
    if (above == nullptr) return absl::OkStatus();
    material.expires = std::min(material.expires, TimeOf(X509_get0_notAfter(above.get())));
    if (SSL_CTX_add1_chain_cert(context, above.get()) != 1) {
      return source.Bad(absl::StrCat("has a chain that cannot be used: ", LastError()));
    }
  }
}

// Notes that a passphrase is asked for, and gives none.
int RefusePassphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::Status UseKey(const Source& source, const std::string& certificate, TlsMaterial& material) {
  bool asked = false;
  SSL_CTX* const context = material.context.get();
  const PrivateKey key(
      PEM_read_bio_PrivateKey(Open(material.key).get(), nullptr, RefusePassphrase, &asked));
  ERR_clear_error();
  if (asked)
    return source.Bad("is encrypted; give the key without a passphrase, in a file of 0600");
  if (key == nullptr) return source.Bad("holds no private key in PEM form");
  if (X509_check_private_key(SSL_CTX_get0_certificate(context), key.get()) != 1) {
    ERR_clear_error();
    return source.Bad(absl::StrCat("is not the key of the certificate in --tls-cert-file ",
                                   certificate, "; give two files that were made together"));
  }
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1) {
    return source.Bad(absl::StrCat("cannot be used: ", LastError()));
  }
  return absl::OkStatus();
}

absl::Status UseCa(const Source& source, TlsEnd end, TlsMaterial& material) {
  const Bytes bytes = Open(material.ca);
  SSL_CTX* const context = material.context.get();
  int count = 0;
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const Certificate ca, Next(source, bytes.get()));
    if (ca == nullptr) break;
    ++count;
    material.ca_expires = std::min(material.ca_expires, TimeOf(X509_get0_notAfter(ca.get())));
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), ca.get()) != 1 ||
        (end == TlsEnd::kServer && SSL_CTX_add_client_CA(context, ca.get()) != 1)) {
      return source.Bad(absl::StrCat("cannot be used: ", LastError()));
    }
  }
  if (count == 0) return source.Bad("holds no certificate in PEM form");
  if (end == TlsEnd::kServer) {
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
  return absl::OkStatus();
}

int SelectHttp11(SSL*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
                 unsigned int offered_size, void*) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, size, kHttp11, sizeof(kHttp11), offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

// As gRPC sets its own contexts, so that all ports of a server answer alike.
absl::Status SetProtocol(SSL_CTX* context) {
  SSL_CTX_set_options(context, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  // A connection that waits, or streams slowly, keeps no buffers; a writer may move its bytes.
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                                SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_alpn_select_cb(context, SelectHttp11, nullptr);
  if (SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) != 1 ||
      SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20") != 1) {
    return absl::InternalError(absl::StrCat("OpenSSL has no TLS 1.2: ", LastError()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsMaterial> ReadTlsMaterial(const TlsPaths& paths, TlsEnd end) {
  const bool serves = end == TlsEnd::kServer;
  const Source certificate = {"--tls-cert-file", paths.certificate};
  const Source key = {"--tls-key-file", paths.key};
  const Source ca = {serves ? "--tls-client-ca-file" : "--tls-ca-file", paths.ca};
  if (paths.certificate.empty() != paths.key.empty()) {
    const Source& given = paths.key.empty() ? certificate : key;
    return given.Bad(absl::StrCat(
        "is given without ", paths.key.empty() ? key.flag : certificate.flag, "; TLS needs both"));
  }
  if (serves && paths.certificate.empty()) return ca.Bad("is given without --tls-cert-file");
  TlsMaterial material;
  material.context = std::shared_ptr<SSL_CTX>(
      SSL_CTX_new(serves ? TLS_server_method() : TLS_client_method()), SSL_CTX_free);
  if (material.context == nullptr) return absl::InternalError("OpenSSL gives no TLS context");
  if (serves) KVASIR_RETURN_IF_ERROR(SetProtocol(material.context.get()));
  if (!paths.certificate.empty()) {
    KVASIR_ASSIGN_OR_RETURN(material.certificate, ReadFile(certificate, Readers::kAnybody));
    KVASIR_ASSIGN_OR_RETURN(material.key, ReadFile(key, Readers::kOwnerAndGroup));
    KVASIR_RETURN_IF_ERROR(UseCertificate(certificate, end, material));
    KVASIR_RETURN_IF_ERROR(UseKey(key, paths.certificate, material));
  }
  if (!paths.ca.empty()) {
    KVASIR_ASSIGN_OR_RETURN(material.ca, ReadFile(ca, Readers::kAnybody));
    KVASIR_RETURN_IF_ERROR(UseCa(ca, end, material));
  }
  return material;
}

std::string DescribeTlsError(unsigned long error) {
  switch (ERR_GET_REASON(error)) {
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return "the peer presents no certificate, and --tls-client-ca-file asks for one";
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
      return "the peer's certificate has expired, is not for its use, or is by no CA that is "
             "trusted here";
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
    case SSL_R_WRONG_VERSION_NUMBER:
      return "the peer speaks without TLS, and this port speaks TLS";
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_VERSION_TOO_LOW:
      return "the peer speaks no TLS 1.2 or newer";
    case SSL_R_NO_SHARED_CIPHER:
      return "the peer knows none of the ciphers";
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      return "the peer does not trust our certificate";
    default:
      break;
  }
  const char* const reason = ERR_reason_error_string(error);
  return reason == nullptr ? "the connection ended in the handshake" : reason;
}

}  // namespace kvasir::proto
