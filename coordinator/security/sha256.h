// SHA-256 of a text. Thread-safe.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

inline constexpr size_t kSha256Bytes = 32;

// Returns kSha256Bytes bytes.
std::string Sha256(absl::string_view text);

}  // namespace kvasir::coordinator
