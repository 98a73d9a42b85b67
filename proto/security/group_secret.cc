#include "proto/security/group_secret.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "openssl/crypto.h"
#include "openssl/evp.h"
#include "openssl/hmac.h"
#include "openssl/rand.h"
#include "proto/sockets.h"

namespace kvasir::proto {
namespace {

constexpr size_t kProofBytes = 32;

// A page that core dumps leave out and, where the limit of locked memory allows, swap too.
class SecretPage {
 public:
  static constexpr size_t kBytes = GroupSecret::kMostBytes + 1;  // one more tells a longer file

  SecretPage() {
    void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    data_ = static_cast<char*>(page);
    mlock(data_, kBytes);
    if (madvise(data_, kBytes, MADV_DONTDUMP) != 0) Release();
  }
  ~SecretPage() { Release(); }
  SecretPage(const SecretPage&) = delete;
  SecretPage& operator=(const SecretPage&) = delete;

  char* data() const { return data_; }  // null when there is no such memory

 private:
  void Release() {
    if (data_ == nullptr) return;
    OPENSSL_cleanse(data_, kBytes);
    munmap(data_, kBytes);
    data_ = nullptr;
  }

  char* data_ = nullptr;
};

absl::string_view NameOf(GroupSecret::Side side) {
  switch (side) {
    case GroupSecret::Side::kCoordinator:
      return "kvasir coordinator:";
    case GroupSecret::Side::kWorker:
      return "kvasir worker:";
    case GroupSecret::Side::kBorrower:
      return "kvasir borrower:";
    case GroupSecret::Side::kLender:
      return "kvasir lender:";
  }
  return "";
}

class SecretInMemory final : public GroupSecret {
 public:
  absl::Status ReadFrom(const std::string& path, absl::string_view flag);

  bool empty() const override { return size_ == 0; }
  std::string Proof(Side side, const Nonces& nonces) const override {
    // The side's name keeps one end from returning the other's proof as its own. Nonces have one
    // length, so the text can be cut in one way only.
    const std::string text = absl::StrCat(NameOf(side), nonces.worker, nonces.coordinator);
    std::string proof(kProofBytes, '\0');
    unsigned int size = 0;
    const unsigned char* made =
        HMAC(EVP_sha256(), empty() ? "" : page_.data(), static_cast<int>(size_),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(),
             reinterpret_cast<unsigned char*>(proof.data()), &size);
    KVASIR_CHECK(made != nullptr && size == kProofBytes);
    return proof;
  }

 private:
  SecretPage page_;
  size_t size_ = 0;
};

absl::Status SecretInMemory::ReadFrom(const std::string& path, absl::string_view flag) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(flag, " ", path, " ", why));
  };
  if (page_.data() == nullptr) {
    return absl::ResourceExhaustedError("no memory that core dumps leave out, for a secret");
  }
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found = {};
  if (!file.valid() || fstat(file.get(), &found) != 0) {
    return bad(absl::StrCat("cannot be read: ", std::strerror(errno)));
  }
  if (!S_ISREG(found.st_mode)) return bad("is not a file");
  // A group may read it: Kubernetes mounts secrets so.
  if ((found.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return bad("is open to other users; chmod 600 it, and make a new secret if they read it");
  }
  while (size_ < SecretPage::kBytes) {
    const ssize_t count = read(file.get(), page_.data() + size_, SecretPage::kBytes - size_);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return bad(absl::StrCat("cannot be read: ", std::strerror(errno)));
    if (count == 0) break;
    size_ += static_cast<size_t>(count);
  }
  if (size_ > kMostBytes) return bad(absl::StrCat("has more than ", kMostBytes, " bytes"));
  while (size_ > 0 && absl::ascii_isspace(static_cast<unsigned char>(page_.data()[size_ - 1]))) {
    --size_;
  }
  if (size_ < kLeastBytes) {
    return bad(absl::StrCat("has ", size_, " bytes, a secret at least ", kLeastBytes,
                            "; 'openssl rand -hex 32' makes one"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const GroupSecret>> GroupSecret::Read(const std::string& path,
                                                                     absl::string_view flag) {
  auto secret = std::make_shared<SecretInMemory>();
  if (!path.empty()) KVASIR_RETURN_IF_ERROR(secret->ReadFrom(path, flag));
  return std::shared_ptr<const GroupSecret>(std::move(secret));
}

absl::Status GroupSecret::Make(const std::string& path) {
  unsigned char bytes[kNonceBytes];
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) {
    return absl::InternalError(absl::StrCat("cannot make ", path, ": ", std::strerror(errno)));
  }
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) return absl::InternalError("no random bytes");
  char text[2 * sizeof(bytes)];  // on the stack, to be wiped: a string would leave copies
  for (size_t i = 0; i < sizeof(bytes); ++i) {
    text[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
    text[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
  }
  const bool written = write(file.get(), text, sizeof(text)) == std::ssize(text);
  OPENSSL_cleanse(bytes, sizeof(bytes));
  OPENSSL_cleanse(text, sizeof(text));
  return written ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat("cannot write ", path, ": no room"));
}

std::string GroupSecret::NewNonce() {
  std::string nonce(kNonceBytes, '\0');
  // The generator fails only where the system has no randomness at all.
  KVASIR_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), kNonceBytes) == 1);
  return nonce;
}

bool GroupSecret::Proves(Side side, const Nonces& nonces, absl::string_view proof) const {
  if (nonces.worker.size() != kNonceBytes || nonces.coordinator.size() != kNonceBytes) return false;
  const std::string expected = Proof(side, nonces);
  return proof.size() == expected.size() &&
         CRYPTO_memcmp(proof.data(), expected.data(), expected.size()) == 0;
}

}  // namespace kvasir::proto
