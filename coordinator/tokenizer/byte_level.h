// The byte-level alphabet of GPT-2: every byte is written as one printable character (Ġ is the
// space), so that a vocabulary of byte strings can be kept as JSON text. Called by the loader only;
// from there on tokens are byte strings. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// The bytes that `symbols` (well-formed UTF-8) stand for; nothing when a character is not of the
// alphabet.
std::optional<std::string> BytesOfSymbols(absl::string_view symbols);

// The character that stands for `byte`.
char32_t SymbolOfByte(uint8_t byte);

}  // namespace kvasir::coordinator
