#include "coordinator/tokenizer/byte_level.h"

#include <array>

#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {
namespace {

constexpr char32_t kNumShifted = 68;  // bytes that are not printable in Latin-1

constexpr bool IsPrintable(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

// A printable byte is its own symbol. The others are numbered upwards from U+0100 in byte order.
constexpr std::array<char32_t, 256> MakeSymbols() {
  std::array<char32_t, 256> symbols{};
  char32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) symbols[byte] = IsPrintable(byte) ? byte : next++;
  return symbols;
}

constexpr std::array<char32_t, 256> kSymbols = MakeSymbols();

constexpr std::array<uint8_t, kNumShifted> MakeShifted() {
  std::array<uint8_t, kNumShifted> bytes{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    if (kSymbols[byte] >= 0x100) bytes[kSymbols[byte] - 0x100] = static_cast<uint8_t>(byte);
  }
  return bytes;
}

constexpr std::array<uint8_t, kNumShifted> kShifted = MakeShifted();

}  // namespace

std::optional<std::string> BytesOfSymbols(absl::string_view symbols) {
  std::string bytes;
  bytes.reserve(symbols.size());
  for (size_t pos = 0; pos < symbols.size();) {
    const Utf8Unit unit = CodePointAt(symbols, pos);
    if (unit.value < 0x100 && IsPrintable(unit.value)) {
      bytes.push_back(static_cast<char>(unit.value));
    } else if (unit.value >= 0x100 && unit.value < 0x100 + kNumShifted) {
      bytes.push_back(static_cast<char>(kShifted[unit.value - 0x100]));
    } else {
      return std::nullopt;
    }
    pos += unit.length;
  }
  return bytes;
}

char32_t SymbolOfByte(uint8_t byte) { return kSymbols[byte]; }

}  // namespace kvasir::coordinator
