// The secret that a coordinator shares with its workers, or workers of replicas with each other,
// from a file. It proves that it is known without being told: an HMAC over random bytes of both
// ends. Its bytes lie in a page of their own that core dumps leave out, and are wiped at the end.
// Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::proto {

class GroupSecret {
 public:
  enum class Side { kCoordinator, kWorker, kBorrower, kLender };
  // Random bytes of one stream, kNonceBytes each. Between peers the lender stands where the worker
  // does, and the borrower where the coordinator does.
  struct Nonces {
    std::string worker;
    std::string coordinator;
  };
  static constexpr size_t kNonceBytes = 32;
  static constexpr size_t kLeastBytes = 32;
  static constexpr size_t kMostBytes = 4096;

  // Reads kLeastBytes to kMostBytes; white space at the end does not count. An empty path gives the
  // empty secret, which everybody knows. INVALID_ARGUMENT, naming `flag`, for a file that cannot be
  // read, has another length, or may be read by others than its owner and group.
  static absl::StatusOr<std::shared_ptr<const GroupSecret>> Read(
      const std::string& path, absl::string_view flag = "--group-secret-file");
  // Writes a random secret to a new file that its owner alone may read. INTERNAL when it cannot.
  static absl::Status Make(const std::string& path);
  static std::string NewNonce();

  virtual ~GroupSecret() = default;
  virtual bool empty() const = 0;
  // Returns the 32 bytes by which `side` proves that it knows the secret, in this stream only.
  virtual std::string Proof(Side side, const Nonces& nonces) const = 0;
  // Returns whether `proof` is that of `side`, in a time that tells nothing of the difference.
  bool Proves(Side side, const Nonces& nonces, absl::string_view proof) const;
};

}  // namespace kvasir::proto
