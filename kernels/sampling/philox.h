// Philox4x32-10: a random function of a counter and a key, without state. Sampling uses the
// request's seed as the key and the token's position as the counter. So a request's random numbers
// depend on nothing else: not on its batch, its rank, or a preemption.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
#pragma once

#include <array>
#include <cstdint>

namespace kvasir::kernels {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

constexpr PhiloxCounter Philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  // The key is bumped by the golden ratio and by sqrt(3) - 1 after each round.
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

// Returns a number uniform in [0, 1), a multiple of 2^-53, for the token at `position` of a
// request.
constexpr double UniformAt(uint64_t seed, uint64_t position) {
  const PhiloxCounter bits =
      Philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t word = (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace kvasir::kernels
