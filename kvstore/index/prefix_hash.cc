#include <array>
#include <bit>
#include <memory>
#include <openssl/evp.h>

#include "kernels/base/status_macros.h"
#include "kvstore/index/prefix_index.h"

namespace kvasir::kvstore {
namespace {

// The hash input is a list of fields [tag: 1 byte][length: 8 bytes, little-endian][bytes]. Each
// message starts with a kDomain field, so a scope is never a block, and no two lists of fields
// encode alike.
enum class Tag : uint8_t {
  kDomain = 1,
  kTenant = 2,
  kWeightsHash = 3,
  kKvForm = 4,
  kPrefillPolicy = 5,
  kParent = 6,
  kTokens = 7,
  kDecodePolicy = 8,
};

class FieldHasher {
 public:
  explicit FieldHasher(absl::string_view domain) : context_(EVP_MD_CTX_new()) {
    KVASIR_CHECK(context_ != nullptr);
    KVASIR_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
    Add(Tag::kDomain, domain.data(), domain.size());
  }

  void Add(Tag tag, const void* bytes, size_t size) {
    std::array<uint8_t, 9> head;
    head[0] = static_cast<uint8_t>(tag);
    for (size_t i = 0; i < 8; ++i) {
      head[1 + i] = static_cast<uint8_t>(static_cast<uint64_t>(size) >> (8 * i));
    }
    Update(head.data(), head.size());
    Update(bytes, size);
  }
  void Add(Tag tag, absl::string_view bytes) { Add(tag, bytes.data(), bytes.size()); }
  void Add(Tag tag, absl::Span<const int32_t> tokens) {
    static_assert(std::endian::native == std::endian::little);
    Add(tag, tokens.data(), tokens.size() * sizeof(int32_t));
  }

  PrefixHash Finish() {
    PrefixHash hash;
    unsigned int size = 0;
    KVASIR_CHECK(EVP_DigestFinal_ex(context_.get(), hash.data(), &size) == 1);
    KVASIR_CHECK(size == hash.size());
    return hash;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };

  void Update(const void* bytes, size_t size) {
    KVASIR_CHECK(EVP_DigestUpdate(context_.get(), bytes, size) == 1);
  }

  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

}  // namespace

PrefixHash HashOwner(absl::string_view tenant) {
  FieldHasher hasher("kvasir block owner");
  hasher.Add(Tag::kTenant, tenant);
  return hasher.Finish();
}

PrefixHash HashScope(const PrefixScope& scope) {
  FieldHasher hasher("kvasir prefix scope");
  hasher.Add(Tag::kTenant, scope.tenant);
  hasher.Add(Tag::kWeightsHash, scope.weights_hash);
  hasher.Add(Tag::kKvForm, scope.kv_form);
  hasher.Add(Tag::kPrefillPolicy, scope.prefill_policy);
  return hasher.Finish();
}

PrefixHash HashBlock(const PrefixHash& parent, absl::Span<const int32_t> tokens,
                     absl::string_view decode_policy) {
  FieldHasher hasher("kvasir prefix block");
  hasher.Add(Tag::kParent, parent.data(), parent.size());
  hasher.Add(Tag::kTokens, tokens);
  hasher.Add(Tag::kDecodePolicy, decode_policy);
  return hasher.Finish();
}

}  // namespace kvasir::kvstore
