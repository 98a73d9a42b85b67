// The loops of elementwise.h over vectors, written once for all widths. elementwise_avx2.cc,
// elementwise_avx512.cc and elementwise_neon.cc include their simd_*.h and then this header. T is
// float, or uint16_t for bfloat16.
//
// Products and sums are not fused (-ffp-contract=off), so that the bits equal those of the plain
// loops. Only the exponential in silu differs from the C library's.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/dense/elementwise.h"
#include "kernels/simd/simd_exp.h"

namespace kvasir::kernels {
namespace {

// Elements [i, i + n) of a row: a whole vector in the main loop, part of a vector at the end.
template <bool kWhole>
struct Chunk {
  int64_t i;
  int64_t n;

  template <typename T>
  Vec Read(const T* row) const {
    return kWhole ? Load(row + i) : LoadPart(row + i, n);
  }
  template <typename T>
  void Write(T* row, Vec v) const {
    if (kWhole) {
      Store(row + i, v);
    } else {
      StorePart(row + i, v, n);
    }
  }
};

template <typename Body>
inline void ForEachChunk(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kSimdWidth <= n; i += kSimdWidth) body(Chunk<true>{i, kSimdWidth});
  if (i < n) body(Chunk<false>{i, n - i});
}

template <typename T>
float SumOfSquares(const T* x, int64_t dim) {
  constexpr int64_t kVectors = kNormLanes / kSimdWidth;
  float lanes[kNormLanes] = {};
  for (int64_t v = 0; v < kVectors; ++v) {
    Vec sum = Broadcast(0);
    int64_t i = v * kSimdWidth;
    for (; i + kSimdWidth <= dim; i += kNormLanes) {
      const Vec value = Load(x + i);
      sum += value * value;
    }
    if (i < dim) {
      const Vec value = LoadPart(x + i, dim - i);
      sum += value * value;
    }
    Store(lanes + v * kSimdWidth, sum);
  }
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

template <typename T>
void NormRow(const NormRows& rows, int64_t row) {
  const T* x = static_cast<const T*>(rows.x) + row * rows.dim;
  const T* weight = static_cast<const T*>(rows.weight);
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  const float mean = SumOfSquares(x, rows.dim) / static_cast<float>(rows.dim);
  const Vec scale = Broadcast(1.0f / sqrtf(mean + rows.epsilon));
  ForEachChunk(rows.dim,
               [&](auto c) { c.Write(y, c.Read(weight) * RoundTo(x, c.Read(x) * scale)); });
}

template <typename T>
void RotateToken(const RopeTokens& tokens, int64_t token) {
  const int64_t half = tokens.half_dim;
  const float* cos = tokens.cos + token * half;
  const float* sin = tokens.sin + token * half;
  for (int64_t head = 0; head < tokens.heads; ++head) {
    T* first = static_cast<T*>(tokens.x) + (token * tokens.heads + head) * 2 * half;
    T* second = first + half;
    ForEachChunk(half, [&](auto c) {
      const Vec a = c.Read(first);
      const Vec b = c.Read(second);
      c.Write(first, a * c.Read(cos) - b * c.Read(sin));
      c.Write(second, b * c.Read(cos) + a * c.Read(sin));
    });
  }
}

template <typename T>
void GateRow(const SiluMulRows& rows, int64_t row) {
  const T* gate = static_cast<const T*>(rows.gate_up) + row * 2 * rows.dim;
  const T* up = gate + rows.dim;
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  ForEachChunk(rows.dim, [&](auto c) {
    const Vec g = c.Read(gate);
    const Vec silu = RoundTo(gate, g / (Broadcast(1) + Exp(Negate(g))));
    c.Write(y, silu * c.Read(up));
  });
}

template <typename X, typename Y>
void AddRow(const AddRows& rows, int64_t row) {
  const X* x = static_cast<const X*>(rows.x) + row * rows.dim;
  Y* y = static_cast<Y*>(rows.y) + row * rows.dim;
  ForEachChunk(rows.dim, [&](auto c) { c.Write(y, c.Read(y) + RoundTo(y, c.Read(x))); });
}

template <typename X>
void RunAddRowsOf(const AddRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.y_dtype == DType::kFloat32 ? AddRow<X, float> : AddRow<X, uint16_t>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

inline void RunAddRowsOfAny(const AddRows& rows, int64_t begin, int64_t end) {
  const bool wide = rows.x_dtype == DType::kFloat32;
  wide ? RunAddRowsOf<float>(rows, begin, end) : RunAddRowsOf<uint16_t>(rows, begin, end);
}

template <typename Rows>
using RowFunction = void (*)(const Rows&, int64_t row);

template <typename Rows>
void RunRows(RowFunction<Rows> f32, RowFunction<Rows> bf16, const Rows& rows, int64_t begin,
             int64_t end) {
  const RowFunction<Rows> run = rows.dtype == DType::kFloat32 ? f32 : bf16;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace
}  // namespace kvasir::kernels
