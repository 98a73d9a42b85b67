// The parts that oracle.py and the tests that replay its cases share: recorded cases, and the
// numbers that keys, queries and values are made of (multiples of 1/8, whose sums are exact).
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "nlohmann/json.hpp"

namespace kvasir::kernels {

enum class OracleSide : int64_t { kQuery = 1, kKey = 2, kValue = 3 };

inline float OracleValue(int64_t seed, OracleSide side, int64_t position, int64_t head, int64_t i) {
  const auto u = [](int64_t x) { return static_cast<uint64_t>(x); };
  uint64_t x = u(seed) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(side) * 0xBF58476D1CE4E5B9u +
               u(position) * 0x94D049BB133111EBu + u(head) * 0xD6E8FEB86659FD93u +
               u(i) * 0xA0761D6478BD642Fu;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return (static_cast<float>((x ^ (x >> 31)) % 33) - 16) / 8;
}

inline nlohmann::json ReadOracleCases(const std::string& name) {
  std::ifstream file("tests/kernels/sparse/golden/" + name);
  return nlohmann::json::parse(file);
}

}  // namespace kvasir::kernels
