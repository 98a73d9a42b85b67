// Certificates that change while they are in use, and connections of a server that polls. Who is
// let in by which certificate is tests/e2e/tls_test.py.
#include "proto/security/tls.h"

#include <chrono>
#include <cstdio>
#include <fcntl.h>
#include <fstream>
#include <memory>
#include <string>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "openssl/evp.h"
#include "openssl/pem.h"
#include "openssl/ssl.h"
#include "openssl/x509.h"
#include "proto/security/tls_material.h"
#include "proto/security/tls_socket.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::proto {
namespace {

using ::testing::HasSubstr;
using Context = std::shared_ptr<SSL_CTX>;

class TlsTest : public ::testing::Test {
 protected:
  // Writes a certificate, signed by itself, and its key.
  void Write(const std::string& certificate, const std::string& key) {
    EVP_PKEY* pair = EVP_EC_gen("P-256");
    X509* made = X509_new();
    ASN1_INTEGER_set(X509_get_serialNumber(made), ++serial_);
    X509_gmtime_adj(X509_getm_notBefore(made), -60);
    X509_gmtime_adj(X509_getm_notAfter(made), 3600);
    X509_set_pubkey(made, pair);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(made), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>("test"), -1, -1, 0);
    X509_set_issuer_name(made, X509_get_subject_name(made));
    ASSERT_GT(X509_sign(made, pair, EVP_sha256()), 0);
    WriteFile(certificate, [&](FILE* file) { return PEM_write_X509(file, made); });
    WriteFile(key, [&](FILE* file) {
      return PEM_write_PrivateKey(file, pair, nullptr, nullptr, 0, nullptr, nullptr);
    });
    X509_free(made);
    EVP_PKEY_free(pair);
  }
  template <typename Body>
  void WriteFile(const std::string& name, const Body& body) {
    const std::string draft = Path(name) + ".new";
    FILE* file = std::fopen(draft.c_str(), "w");
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(body(file), 1);
    std::fclose(file);
    chmod(draft.c_str(), 0600);
    ASSERT_EQ(std::rename(draft.c_str(), Path(name).c_str()), 0);
  }
  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_.path(), "/", name);
  }
  std::shared_ptr<ServerTls> Load() {
    v1::TlsServerConfig config;
    config.set_tls_cert_file(Path("cert"));
    config.set_tls_key_file(Path("key"));
    return ServerTls::Load(config).value();
  }
  static long SerialOf(const Context& context) {
    return ASN1_INTEGER_get(X509_get0_serialNumber(SSL_CTX_get0_certificate(context.get())));
  }

  const kvasir::testing::ScratchDirectory folder_;
  long serial_ = 0;
};

TEST_F(TlsTest, ARenewedCertificateIsInForceWhileOthersReadIt) {
  Write("cert", "key");
  const std::shared_ptr<ServerTls> tls = Load();
  const Context old = tls->Context();
  EXPECT_EQ(SerialOf(old), 1);
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (SerialOf(tls->Context()) == 1) std::this_thread::yield();
    });
  }
  Write("cert", "key");
  for (std::thread& reader : readers) reader.join();  // for ever, if nothing is read again
  EXPECT_EQ(SerialOf(tls->Context()), 2);
  EXPECT_EQ(SerialOf(old), 1) << "connections that have it keep it";
}

TEST_F(TlsTest, FilesThatDoNotBelongTogetherChangeNothing) {
  Write("cert", "key");
  const std::shared_ptr<ServerTls> tls = Load();
  Write("cert", "another-key");
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // two looks at the files
  EXPECT_EQ(SerialOf(tls->Context()), 1);
  const absl::Status read =
      ReadTlsMaterial({.certificate = Path("cert"), .key = Path("key"), .ca = ""}, TlsEnd::kServer)
          .status();
  EXPECT_TRUE(absl::IsInvalidArgument(read));
  EXPECT_THAT(std::string(read.message()), HasSubstr("is not the key of the certificate"));
}

TEST_F(TlsTest, WithoutFilesPortsAndChannelsArePlain) {
  EXPECT_EQ(ServerTls::Load({}).value(), nullptr);
  EXPECT_TRUE(ChannelTls::Load({}).ok());
  v1::TlsClientConfig config;
  config.set_tls_cert_file("cert");
  config.set_tls_key_file("key");
  EXPECT_TRUE(absl::IsInvalidArgument(ChannelTls::Load(config).status())) << "trusts nobody";
}

// Bytes come one by one, and an answer goes out in parts.
TEST_F(TlsTest, ASocketThatPollsGoesOnWhereItStopped) {
  Write("cert", "key");
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  TlsSocket server((Descriptor(ends[0])), Load()->Context());
  const Descriptor other(ends[1]);
  const Context context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  SSL* client = SSL_new(context.get());
  SSL_set_fd(client, other.get());
  SSL_set_connect_state(client);
  char bytes[4096];
  size_t count = 0;
  EXPECT_EQ(server.Read(bytes, sizeof(bytes), count), TlsSocket::Result::kAgain);
  while (SSL_write(client, "GET /", 5) != 5) {
    EXPECT_NE(server.Read(bytes, sizeof(bytes), count), TlsSocket::Result::kEnded);
  }
  std::string got;
  while (got.size() < 5) {
    if (server.Read(bytes, 2, count) == TlsSocket::Result::kDone) got.append(bytes, count);
  }
  EXPECT_EQ(got, "GET /");
  EXPECT_FALSE(server.is_plain_by_mistake());

  const std::string answer(5'000'000, 'a');
  size_t sent = 0;
  std::string received;
  while (received.size() < answer.size()) {
    if (sent < answer.size()) {
      ASSERT_NE(server.Write(answer.data() + sent, answer.size() - sent, count),
                TlsSocket::Result::kEnded);
      sent += count;
      if (sent == answer.size()) server.EndWriting();
    }
    const int taken = SSL_read(client, bytes, sizeof(bytes));
    if (taken > 0) received.append(bytes, static_cast<size_t>(taken));
  }
  EXPECT_EQ(received, answer);
  EXPECT_EQ(SSL_read(client, bytes, sizeof(bytes)), 0);
  EXPECT_EQ(SSL_get_shutdown(client), SSL_RECEIVED_SHUTDOWN) << "the end is told within TLS";
  SSL_free(client);
}

TEST_F(TlsTest, APeerWithoutTlsIsKnownByItsFirstByte) {
  Write("cert", "key");
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  TlsSocket server((Descriptor(ends[0])), Load()->Context());
  const Descriptor client(ends[1]);
  ASSERT_EQ(send(client.get(), "GET /", 5, 0), 5);
  char bytes[16];
  size_t count = 0;
  EXPECT_EQ(server.Read(bytes, sizeof(bytes), count), TlsSocket::Result::kDone);
  EXPECT_TRUE(server.is_plain_by_mistake());
  EXPECT_EQ(std::string(bytes, count), "GET /");
  EXPECT_EQ(server.Write("400", 3, count), TlsSocket::Result::kDone);
  EXPECT_EQ(recv(client.get(), bytes, sizeof(bytes), 0), 3);
}

}  // namespace
}  // namespace kvasir::proto
