#include "proto/security/tls.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <grpc/grpc_security.h>
#include <sys/stat.h>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/process/named_thread.h"
#include "proto/security/tls_material.h"
#include "proto/sockets.h"

namespace kvasir::proto {
namespace {

using kernels::MutexLock;
using Material = std::shared_ptr<const TlsMaterial>;

constexpr std::chrono::milliseconds kWatchTime(500);

// Inode, size and time of each file: one of them changes when a file is replaced.
using Versions = std::array<std::tuple<uint64_t, int64_t, int64_t>, 3>;

Versions VersionsOnDisk(const TlsPaths& paths) {
  const auto version = [](const std::string& path) -> Versions::value_type {
    struct stat found = {};
    if (stat(path.c_str(), &found) != 0) return {};
    return {found.st_ino, found.st_size,
            int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec};
  };
  return {version(paths.certificate), version(paths.key), version(paths.ca)};
}

// Files of one end, and what they held when they could last serve. Thread-safe.
class MaterialOfFiles {
 public:
  MaterialOfFiles(TlsPaths paths, TlsEnd end) : paths_(std::move(paths)), end_(end) {}

  absl::Status Read() EXCLUDES(mu_) {
    // Before the files are read, so that a change meanwhile is seen.
    Versions found = VersionsOnDisk(paths_);
    absl::StatusOr<TlsMaterial> read = ReadTlsMaterial(paths_, end_);
    MutexLock lock(mu_);
    versions_ = found;
    if (read.ok()) material_ = std::make_shared<const TlsMaterial>(*std::move(read));
    return read.status();
  }
  // Reads the files if they have changed.
  void Follow() EXCLUDES(mu_) {
    const Versions found = VersionsOnDisk(paths_);
    {
      MutexLock lock(mu_);
      if (found == versions_) return;
    }
    if (const absl::Status read = Read(); !read.ok()) {
      spdlog::warn("the TLS certificate in force stays: {}", std::string(read.message()));
    } else {
      LogExpiry();
    }
  }
  void LogExpiry() const EXCLUDES(mu_) {
    const Material material = Get();
    if (material->certificate.empty()) return;
    spdlog::info("the TLS certificate of {} serves until {}", paths_.certificate,
                 absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", material->expires, absl::UTCTimeZone()));
  }
  Material Get() const EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return material_;
  }

 private:
  const TlsPaths paths_;
  const TlsEnd end_;
  mutable kernels::Mutex mu_;
  Versions versions_ GUARDED_BY(mu_) = {};
  Material material_ GUARDED_BY(mu_);
};

// Credentials whose certificate gRPC asks for at each handshake. Those of grpc++ that watch files
// forget the certificate in force when the new files do not belong together, and then use it.
class AskedCredentials final : public grpc::ServerCredentials {
 public:
  AskedCredentials(std::shared_ptr<const ServerTls> owner, const MaterialOfFiles& files)
      : owner_(std::move(owner)), files_(files) {
    const auto clients = files_.Get()->ca.empty()
                             ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                             : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(clients, Ask, this));
  }
  ~AskedCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    KVASIR_CHECK(false);  // callers are known by API keys and secrets, not here
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status Ask(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<AskedCredentials*>(self)->Tell(config);
  }
  grpc_ssl_certificate_config_reload_status Tell(grpc_ssl_server_certificate_config** config)
      EXCLUDES(mu_) {
    const Material material = files_.Get();
    MutexLock lock(mu_);
    if (std::exchange(told_, material) == material) {
      return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    }
    const grpc_ssl_pem_key_cert_pair pair = {material->key.c_str(), material->certificate.c_str()};
    // gRPC wants a CA even where no client is asked for a certificate; then it judges nobody.
    const std::string& ca = material->ca.empty() ? material->certificate : material->ca;
    *config = grpc_ssl_server_certificate_config_create(ca.c_str(), &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::shared_ptr<const ServerTls> owner_;  // of files_
  const MaterialOfFiles& files_;
  grpc_server_credentials* credentials_ = nullptr;
  kernels::Mutex mu_;
  Material told_ GUARDED_BY(mu_);
};

class WatchingServerTls final : public ServerTls,
                                public std::enable_shared_from_this<WatchingServerTls> {
 public:
  explicit WatchingServerTls(const v1::TlsServerConfig& config)
      : files_({.certificate = config.tls_cert_file(),
                .key = config.tls_key_file(),
                .ca = config.tls_client_ca_file()},
               TlsEnd::kServer) {}
  ~WatchingServerTls() override {
    {
      MutexLock lock(mu_);
      ending_ = true;
      ends_.NotifyAll();
    }
    if (watch_.joinable()) watch_.join();
  }

  absl::Status Start() {
    KVASIR_RETURN_IF_ERROR(files_.Read());
    files_.LogExpiry();
    watch_ = NamedThread("tls-files", [this] { Watch(); });
    return absl::OkStatus();
  }

  std::shared_ptr<grpc::ServerCredentials> GrpcCredentials() override {
    return std::make_shared<AskedCredentials>(shared_from_this(), files_);
  }
  std::shared_ptr<ssl_ctx_st> Context() const override { return files_.Get()->context; }
  void ExportTo(prometheus::Registry& registry) override EXCLUDES(mu_) {
    auto& ends = prometheus::BuildGauge()
                     .Name("kvasir_tls_certificate_expiry_timestamp_seconds")
                     .Help(
                         "Earliest end of the certificates that are in force, in seconds since "
                         "1970, by the file that holds them.")
                     .Register(registry);
    MutexLock lock(mu_);
    certificate_end_ = &ends.Add({{"role", "certificate"}});
    if (!files_.Get()->ca.empty()) ca_end_ = &ends.Add({{"role", "client_ca"}});
    Publish();
  }

 private:
  void Publish() REQUIRES(mu_) {
    const Material material = files_.Get();
    if (certificate_end_ == nullptr) return;
    certificate_end_->Set(absl::ToDoubleSeconds(material->expires - absl::UnixEpoch()));
    if (ca_end_ == nullptr) return;
    ca_end_->Set(absl::ToDoubleSeconds(material->ca_expires - absl::UnixEpoch()));
  }
  void Watch() EXCLUDES(mu_) {
    MutexLock lock(mu_);
    while (!ending_) {
      ends_.WaitUntil(mu_, std::chrono::steady_clock::now() + kWatchTime);
      if (ending_) return;
      mu_.Unlock();
      files_.Follow();
      mu_.Lock();
      Publish();
    }
  }

  MaterialOfFiles files_;
  kernels::Mutex mu_;
  kernels::CondVar ends_;
  prometheus::Gauge* certificate_end_ GUARDED_BY(mu_) = nullptr;  // null: not exported
  prometheus::Gauge* ca_end_ GUARDED_BY(mu_) = nullptr;           // null, too: there is no CA
  bool ending_ GUARDED_BY(mu_) = false;
  std::thread watch_;
};

class FileChannelTls final : public ChannelTls {
 public:
  explicit FileChannelTls(const v1::TlsClientConfig& config)
      : is_plain_(config.tls_ca_file().empty()),
        files_({.certificate = config.tls_cert_file(),
                .key = config.tls_key_file(),
                .ca = config.tls_ca_file()},
               TlsEnd::kClient) {}

  absl::Status Read() { return is_plain_ ? absl::OkStatus() : files_.Read(); }

  std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(const std::string& address) override {
    if (is_plain_ || IsUnixAddress(address)) return grpc::InsecureChannelCredentials();
    files_.Follow();
    const Material material = files_.Get();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = material->ca;
    options.pem_private_key = material->key;
    options.pem_cert_chain = material->certificate;
    return grpc::SslCredentials(options);
  }

 private:
  const bool is_plain_;
  MaterialOfFiles files_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<ServerTls>> ServerTls::Load(const v1::TlsServerConfig& config) {
  if (config.tls_cert_file().empty() && config.tls_key_file().empty() &&
      config.tls_client_ca_file().empty()) {
    return nullptr;
  }
  auto tls = std::make_shared<WatchingServerTls>(config);
  KVASIR_RETURN_IF_ERROR(tls->Start());
  return tls;
}

absl::StatusOr<std::shared_ptr<ChannelTls>> ChannelTls::Load(const v1::TlsClientConfig& config) {
  if (config.tls_ca_file().empty() &&
      !(config.tls_cert_file().empty() && config.tls_key_file().empty())) {
    return absl::InvalidArgumentError(
        "--tls-cert-file and --tls-key-file are given without --tls-ca-file; TLS needs the CA by "
        "which the server is known");
  }
  auto tls = std::make_shared<FileChannelTls>(config);
  KVASIR_RETURN_IF_ERROR(tls->Read());
  return tls;
}

}  // namespace kvasir::proto
