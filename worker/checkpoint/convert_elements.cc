#include "worker/checkpoint/convert_elements.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

using kernels::BFloat16;
using kernels::DType;

struct Float16 {
  uint16_t bits;
};

float ToFloat(BFloat16 value) { return static_cast<float>(value); }
float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu);
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
  // With the fields moved into place the exponent is 112 too low, also for subnormals.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

template <typename To, typename From>
To ConvertOne(From value) {
  if constexpr (std::is_same_v<From, float>) {
    return To(value);
  } else {
    return To(ToFloat(value));
  }
}

bool IsFinite(float value) { return (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u; }
bool IsFinite(BFloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }

// Checks several elements at once: added to an exponent of ones, its lowest bit carries into the
// sign.
template <typename T>
bool AllFinite(std::span<const std::byte> words) {
  constexpr bool is_narrow = sizeof(T) == 2;
  constexpr uint64_t kEach = is_narrow ? 0x0001'0001'0001'0001u : 0x0000'0001'0000'0001u;
  constexpr uint64_t kExponents = kEach * (is_narrow ? 0x7f80u : 0x7f80'0000u);
  constexpr uint64_t kLowest = kEach * (is_narrow ? 0x0080u : 0x0080'0000u);
  constexpr uint64_t kSigns = kEach * (is_narrow ? 0x8000u : 0x8000'0000u);
  uint64_t carried = 0;
  for (size_t at = 0; at < words.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, words.data() + at, sizeof(word));
    carried |= (word & kExponents) + kLowest;
  }
  return (carried & kSigns) == 0;
}

// Returns the index of the first element that is not finite; -1: there is none.
template <typename T>
int64_t FirstBad(std::span<const std::byte> elements) {
  const size_t words = elements.size() / sizeof(uint64_t) * sizeof(uint64_t);
  const size_t first = AllFinite<T>(elements.first(words)) ? words / sizeof(T) : 0;
  for (size_t i = first; i < elements.size() / sizeof(T); ++i) {
    T value;
    std::memcpy(&value, elements.data() + i * sizeof(T), sizeof(T));
    if (!IsFinite(value)) return static_cast<int64_t>(i);
  }
  return -1;
}

template <typename From, typename To>
int64_t Convert(std::span<const std::byte> in, std::byte* out) {
  const size_t count = in.size() / sizeof(From);
  if constexpr (std::is_same_v<From, To>) {
    if (out != in.data()) std::memcpy(out, in.data(), in.size());
  } else {
    for (size_t i = 0; i < count; ++i) {
      From value;
      std::memcpy(&value, in.data() + i * sizeof(From), sizeof(From));
      const To converted = ConvertOne<To>(value);
      std::memcpy(out + i * sizeof(To), &converted, sizeof(To));
    }
  }
  return FirstBad<To>({out, count * sizeof(To)});
}

template <typename From>
int64_t ConvertFrom(std::span<const std::byte> in, DType to, std::byte* out) {
  KVASIR_CHECK(to == DType::kFloat32 || to == DType::kBFloat16);
  return to == DType::kFloat32 ? Convert<From, float>(in, out) : Convert<From, BFloat16>(in, out);
}

}  // namespace

int64_t ConvertElements(DType from, std::span<const std::byte> in, DType to, std::byte* out) {
  switch (from) {
    case DType::kFloat32:
      return ConvertFrom<float>(in, to, out);
    case DType::kBFloat16:
      return ConvertFrom<BFloat16>(in, to, out);
    case DType::kFloat16:
      return ConvertFrom<Float16>(in, to, out);
    case DType::kInt32:
    case DType::kFloat8E4M3:
    case DType::kInt8:
      break;
  }
  KVASIR_CHECK(false && "weights are floating point");
  return -1;
}

}  // namespace kvasir::worker
