#include "coordinator/security/sha256.h"

#include "openssl/sha.h"

namespace kvasir::coordinator {

static_assert(kSha256Bytes == SHA256_DIGEST_LENGTH);

std::string Sha256(absl::string_view text) {
  std::string hash(kSha256Bytes, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(hash.data()));
  return hash;
}

}  // namespace kvasir::coordinator
