// The byte-level alphabet of GPT-2: every byte is written as one printable character (Ġ is the
// space), so that JSON text can hold a vocabulary of byte strings. Called by the loader only; after
// it tokens are byte strings. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// Returns the bytes that `symbols` (well-formed UTF-8) stand for; nullopt when a character is not
// in the alphabet.
std::optional<std::string> BytesOfSymbols(absl::string_view symbols);

// Returns the character that stands for `byte`.
char32_t SymbolOfByte(uint8_t byte);

}  // namespace kvasir::coordinator
