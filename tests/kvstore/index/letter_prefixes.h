// Prefixes of the tests of the prefix index: a letter stands for a block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/index/prefix_index.h"

namespace kvasir::kvstore {

// A prefix for tests: one letter per block; each block is 64 times the letter.
inline std::vector<int32_t> Tokens(const std::string& letters) {
  std::vector<int32_t> tokens;
  for (char letter : letters) tokens.insert(tokens.end(), kBlockTokens, letter);
  return tokens;
}

inline PrefixHash Scope(const std::string& tenant = "") {
  PrefixScope scope;
  scope.tenant = tenant;
  return HashScope(scope);
}

inline PrefixHash HashOf(const PrefixHash& scope, const std::string& letters,
                         const BlockHasher& hasher = HashBlock) {
  PrefixHash hash = scope;
  for (char letter : letters) hash = hasher(hash, Tokens({letter}), "");
  return hash;
}

// Keeps only `bits` bits of the hash, so that collisions are common.
inline BlockHasher WeakHasher(int bits) {
  return
      [bits](const PrefixHash& parent, absl::Span<const int32_t> tokens, absl::string_view policy) {
        const PrefixHash strong = HashBlock(parent, tokens, policy);
        const uint32_t kept =
            (uint32_t{strong[0]} | uint32_t{strong[1]} << 8) & ((uint32_t{1} << bits) - 1);
        PrefixHash weak{};
        weak[0] = static_cast<uint8_t>(kept);
        weak[1] = static_cast<uint8_t>(kept >> 8);
        return weak;
      };
}

}  // namespace kvasir::kvstore
