// The API keys of a server, from a YAML file that holds their hashes: who may ask, as which tenant
// and within which limits. The file is read again when it changes, and a bad one leaves the keys
// that are in force. Keys are random, at least 32 characters, so that a plain SHA-256 of them
// cannot be searched. Made by the server, asked by every transport. Thread-safe.
//
//   keys:
//     - name: contracts-team         # in logs; unique
//       sha256: 9f86d081884c7d65...  # 64 hexadecimal digits
//       tenant: contracts            # of every request under this key
//       concurrent-requests: 8       # absent: no limit
//       tokens-per-minute: 200000    # absent: no limit
//       kv-size-gb: 40               # that its running requests may reach; absent: no limit
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/security/caller.h"
#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

class ApiKeys {
 public:
  // INVALID_ARGUMENT, with the key and the field, for a file that others may write, or that is
  // wrong: unknown fields, a name or a hash given twice, more than 10,000 keys.
  static absl::StatusOr<std::unique_ptr<ApiKeys>> Load(const std::string& path);
  ~ApiKeys();

  // Returns whose key "Bearer KEY" holds, or UNAUTHENTICATED. The time tells how many keys there
  // are and nothing of the one presented: every hash is compared, in constant time.
  absl::StatusOr<std::shared_ptr<const Caller>> Authenticate(absl::string_view authorization) const
      EXCLUDES(mu_);

  // Reads the file again. The keys in force stay when it is wrong.
  absl::Status Reload() EXCLUDES(mu_);

 private:
  struct Key {
    std::string sha256;  // 32 bytes
    std::shared_ptr<const Caller> caller;
  };

  explicit ApiKeys(std::string path) : path_(std::move(path)) {}
  // Changes when the file is written or replaced: inode, size, time of the last change in ns.
  using Version = std::tuple<uint64_t, int64_t, int64_t>;
  Version VersionOnDisk() const;
  // Reloads the file when it is another than `known`, until the end.
  void Watch(Version known);

  const std::string path_;
  mutable kernels::Mutex mu_;
  std::vector<Key> keys_ GUARDED_BY(mu_);
  kernels::CondVar ends_;
  bool ending_ GUARDED_BY(mu_) = false;
  std::thread watch_;
};

}  // namespace kvasir::coordinator
