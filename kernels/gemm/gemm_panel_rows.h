// How the panel kernels keep x: rows in blocks of k, as float32, or for int8 weights in 16 bits
// with scales. Part of gemm_panel_simd.h; gemm_panel.h explains the form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm_panel.h"

namespace kvasir::kernels {
namespace {

inline int64_t BlockEnd(const PanelJob& job, int64_t k_begin) {
  const int64_t end = k_begin + job.k_block;
  return end < job.weights.k ? end : job.weights.k;
}

template <typename T>
void PackRow(const PanelJob& job, const T* x, int64_t row) {
  for (int64_t k_begin = 0; k_begin < job.weights.k; k_begin += job.k_block) {
    const int64_t k = BlockEnd(job, k_begin) - k_begin;
    float* out = UnitsOfX(job, row, k_begin);
    int64_t i = 0;
    for (; i + kSimdWidth <= k; i += kSimdWidth) Store(out + i, Load(x + k_begin + i));
    if (i < k) StorePart(out + i, LoadPart(x + k_begin + i, k - i), k - i);
  }
}

// Rounds neighbours in a row of x, at most kScaleGroup, to int16 and a scale.
template <typename T>
inline void RoundGroup(const T* x, int64_t count, int16_t* out, float* scale) {
  using UintVec __attribute__((vector_size(sizeof(Vec)))) = uint32_t;
  constexpr int64_t kVectors = kScaleGroup / kSimdWidth;
  Vec v[static_cast<size_t>(kVectors)];
  UintVec largest = {};
  for (int64_t i = 0; i < kVectors; ++i) {
    const int64_t left = count - i * kSimdWidth;
    v[i] = left >= kSimdWidth ? Load(x + i * kSimdWidth)
           : left > 0         ? LoadPart(x + i * kSimdWidth, left)
                              : Broadcast(0);
    const UintVec magnitude = reinterpret_cast<UintVec>(v[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint32_t largest_of_all = 0;
  for (int64_t i = 0; i < kSimdWidth; ++i) {
    largest_of_all = largest[i] > largest_of_all ? largest[i] : largest_of_all;
  }
  const XScale found = ScaleOfX(largest_of_all);
  *scale = found.scale;
  const Vec inverse = Broadcast(found.inverse);
  for (int64_t i = 0; i < kVectors; ++i) StoreAsInt16(out + i * kSimdWidth, v[i] * inverse);
}

template <typename T>
void RoundRow(const PanelJob& job, const T* x, int64_t row) {
  for (int64_t k = 0; k < job.weights.k; k += kScaleUnits) {
    const int64_t left = job.weights.inputs - 2 * k;
    RoundGroup(x + 2 * k, left < kScaleGroup ? left : kScaleGroup,
               reinterpret_cast<int16_t*>(UnitsOfX(job, row, k)), ScalesOfX(job, row, k));
  }
}

template <typename T>
void PackRowsOf(const PanelJob& job, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (job.weights.format == PanelFormat::kInt8) {
      RoundRow(job, reinterpret_cast<const T*>(job.x) + row * job.weights.inputs, row);
    } else {
      PackRow(job, reinterpret_cast<const T*>(job.x) + row * job.weights.k, row);
    }
  }
}

void PackRows(const PanelJob& job, int64_t row_begin, int64_t row_end) {
  if (job.x_is_bfloat16) return PackRowsOf<uint16_t>(job, row_begin, row_end);
  PackRowsOf<float>(job, row_begin, row_end);
}

}  // namespace
}  // namespace kvasir::kernels
