#include "coordinator/security/api_keys.h"

#include <chrono>
#include <sys/stat.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "spdlog/spdlog.h"

#include "coordinator/security/api_keys_file.h"
#include "coordinator/security/sha256.h"
#include "kernels/base/status_macros.h"
#include "openssl/crypto.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr size_t kMostHeaderBytes = 1024;
constexpr std::chrono::seconds kWatchTime(1);

}  // namespace

absl::StatusOr<std::unique_ptr<ApiKeys>> ApiKeys::Load(const std::string& path) {
  std::unique_ptr<ApiKeys> keys(new ApiKeys(path));
  // Before the first read, so that a change during it is seen.
  const Version version = keys->VersionOnDisk();
  KVASIR_RETURN_IF_ERROR(keys->Reload());
  keys->watch_ =
      proto::NamedThread("key-file", [raw = keys.get(), version] { raw->Watch(version); });
  return keys;
}

ApiKeys::Version ApiKeys::VersionOnDisk() const {
  struct stat found = {};
  if (stat(path_.c_str(), &found) != 0) return {};
  return {found.st_ino, found.st_size,
          int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec};
}

ApiKeys::~ApiKeys() {
  {
    MutexLock lock(mu_);
    ending_ = true;
    ends_.NotifyAll();
  }
  if (watch_.joinable()) watch_.join();
}

void ApiKeys::Watch(Version known) {
  MutexLock lock(mu_);
  while (!ending_) {
    ends_.WaitUntil(mu_, std::chrono::steady_clock::now() + kWatchTime);
    if (ending_) return;
    mu_.Unlock();
    const Version found = VersionOnDisk();
    if (found != known) {
      known = found;
      if (const absl::Status read = Reload(); !read.ok()) {
        spdlog::warn("the API keys in force stay: {}", std::string(read.message()));
      }
    }
    mu_.Lock();
  }
}

absl::Status ApiKeys::Reload() {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<ApiKeyEntry> entries, ReadApiKeys(path_));
  MutexLock lock(mu_);
  absl::flat_hash_map<std::string, const Caller*> before;
  for (const Key& key : keys_) before[key.caller->name()] = key.caller.get();
  std::vector<Key> keys;
  for (const ApiKeyEntry& entry : entries) {
    const auto known = before.find(entry.name);
    keys.push_back({.sha256 = entry.sha256,
                    .caller = std::make_shared<const Caller>(
                        entry.name, entry.tenant, entry.limits,
                        known == before.end() ? nullptr : known->second)});
  }
  keys_ = std::move(keys);
  spdlog::info("{} API keys are in force", keys_.size());
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Caller>> ApiKeys::Authenticate(
    absl::string_view authorization) const {
  constexpr absl::string_view kScheme = "bearer ";
  const absl::Status unknown =
      absl::UnauthenticatedError("no valid API key; send 'Authorization: Bearer KEY'");
  if (authorization.size() > kMostHeaderBytes ||
      !absl::StartsWithIgnoreCase(authorization, kScheme)) {
    return unknown;
  }
  const absl::string_view key = absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
  const std::string hash = Sha256(key);
  std::shared_ptr<const Caller> found;
  MutexLock lock(mu_);
  for (const Key& known : keys_) {
    if (CRYPTO_memcmp(known.sha256.data(), hash.data(), kSha256Bytes) == 0) found = known.caller;
  }
  if (found == nullptr) return unknown;
  return found;
}

}  // namespace kvasir::coordinator
