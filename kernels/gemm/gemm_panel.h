// Internal to gemm: how the panel engine stores weights, and its kernels, one set for each
// instruction set. All sets are the same body (gemm_panel_simd.h) but for the plain one
// (gemm_panel_cpu.cc).
//
// Columns stand in panels of 2 L, where L is the number of floats in a vector, and panels in groups
// of 32 columns, or 64 of int8: one k of a group is a cache line or two. The last panel is filled
// up with zeros, the last group may have fewer panels. A group is read from its first byte to its
// last:
//
//   float32, bfloat16   [k][columns of the group]
//   bfloat16 pairs      the same, of units of two neighbours in k
//   int8                for each 32 of k: [scales of the group's columns], then [units][columns]
//                       of units of two neighbours in k, the last of an odd K with a zero
//
// bfloat16 columns of a panel, and scales, alternate: column 0, L, 1, L + 1, ..., so that a shift
// and a mask make two vectors of one load. A scale is the bfloat16 above the largest |w| of its 32
// weights / 127: half the bytes of a float32, a 17th of all that a decode step reads.
//
// int8 weights are multiplied by x in 16 bits: for each 32 of k a row of x becomes whole multiples
// of a power of two, the largest |x| at least 2^14 and less than 2^15 of them. So x is off by at
// most 2^-15 of its largest neighbour, where bfloat16 is off by 2^-9 of itself. One instruction
// then adds two products exactly, and a sum of 32 fits into int32.
//
// An element of y in float32 and bfloat16 is one chain of fused multiply-adds over k = 0 .. K-1;
// in int8 the exact sums of 32 products are added in order, each by one fused multiply-add with
// the product of its two scales. Then the bias is added. So the bits are the same for every number
// of rows, thread and instruction set. Pairs of bfloat16 are the exception: an instruction of
// AVX512_BF16 adds two products at a time, so their bits are their own, but as independent of rows
// and threads.
//
// Plain structs only: files compiled for more than the plain machine must not instantiate inline
// functions that the linker could share. What is inline here has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

enum class PanelFormat : uint8_t { kFloat32, kBFloat16, kBFloat16Pairs, kInt8 };

struct PanelWeights {
  PanelFormat format = PanelFormat::kFloat32;
  int64_t n = 0;
  int64_t inputs = 0;               // K
  int64_t k = 0;                    // units of the format that K takes: NumUnits
  const std::byte* data = nullptr;  // aligned to 64 bytes
  const float* bias = nullptr;      // [n] and zeros up to the end of the last panel; or null
};

// One product of some rows.
struct PanelJob {
  PanelWeights weights;
  const std::byte* x = nullptr;  // [rows, inputs]
  std::byte* y = nullptr;        // [rows, n]
  bool x_is_bfloat16 = false;
  bool y_is_bfloat16 = false;
  int64_t rows = 0;
  // x as float32, or pairs in the room of one: [blocks of k][rows][kMaxKBlock], of which the first
  // k_block are used.
  float* x_blocks = nullptr;
  float* x_scales = nullptr;  // int8 only: [blocks of k][rows][kMaxXScales]
  int64_t k_block = 0;        // units, a multiple of 32, but for a last block; at most kMaxKBlock
  // How far ahead a single pass over weights prefetches; 0 where the processor does it well alone.
  int64_t ahead_bytes = 0;
};

// A part of y.
struct PanelItem {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t panel_begin = 0;
  int64_t panel_end = 0;
};

struct PanelKernels {
  int64_t lanes = 0;      // L
  int64_t tile_rows = 0;  // rows whose sums stay in registers
  // Fills x_blocks for these rows.
  void (*pack_rows)(const PanelJob& job, int64_t row_begin, int64_t row_end) = nullptr;
  // All rows, at most kMaxFewRows, of the columns of some groups: reads each weight once.
  void (*few_rows)(const PanelJob& job, int64_t group_begin, int64_t group_end) = nullptr;
  // Decodes each panel once, block by block, and multiplies many rows by it.
  // `scratch`: ManyRowsScratchFloats of the item, aligned to 64 bytes.
  void (*many_rows)(const PanelJob& job, const PanelItem& item, float* scratch) = nullptr;
};

PanelKernels PortablePanelKernels();
PanelKernels NeonPanelKernels();
PanelKernels Avx2PanelKernels();
PanelKernels Avx512PanelKernels();
// For kBFloat16Pairs only, with x as it is: x_is_bfloat16 is false, for a pair moves as a float
// does.
PanelKernels Avx512Bf16PanelKernels();

namespace {

constexpr int64_t kScaleGroup = 32;  // of K, with one scale a column
constexpr int64_t kScaleUnits = kScaleGroup / 2;
constexpr int64_t kMaxFewRows = 24;
// Units of k in a block. As float32 a panel of them is 12 KiB (AVX2) or 24 (AVX-512) of a core's
// nearest cache.
constexpr int64_t kMaxKBlock = 192;
constexpr int64_t kMaxXScales = kMaxKBlock / kScaleUnits;

inline int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int64_t UnitBytes(PanelFormat format) {
  return format == PanelFormat::kBFloat16 || format == PanelFormat::kInt8 ? 2 : 4;
}

inline int64_t GroupColumns(PanelFormat format) { return format == PanelFormat::kInt8 ? 64 : 32; }

// Weights in a unit.
inline int64_t UnitWeights(PanelFormat format) {
  return format == PanelFormat::kBFloat16Pairs || format == PanelFormat::kInt8 ? 2 : 1;
}

// Units of so many weights, an even number for pairs of bfloat16.
inline int64_t NumUnits(PanelFormat format, int64_t weights) {
  return DivideUp(weights, UnitWeights(format));
}

// Bytes that one column takes for k units.
inline int64_t PanelColumnBytes(PanelFormat format, int64_t k) {
  const int64_t scales = format == PanelFormat::kInt8 ? DivideUp(k, kScaleUnits) : 0;
  return k * UnitBytes(format) + 2 * scales;
}

// How 32 neighbours in a row of x are rounded.
struct XScale {
  float scale;    // a power of two, at least 2^-126; NaN where one of them is not finite
  float inverse;  // the multiples are x * inverse, rounded to nearest even and at most 2^15 - 1
};

// `largest` is the largest |x| of them, as bits.
inline XScale ScaleOfX(uint32_t largest) {
  constexpr uint32_t kMantissaBits = 23, kNotFinite = 255, kWholeBits = 14;
  const uint32_t exponent = largest >> kMantissaBits;  // 127 more than the power
  const uint32_t least = kWholeBits + 1;
  const uint32_t scale = (exponent < least ? least : exponent) - kWholeBits;
  const uint32_t scale_bits = exponent == kNotFinite ? 0x7fc00000 : scale << kMantissaBits;
  const uint32_t inverse_bits = (2 * 127 - scale) << kMantissaBits;
  XScale result;
  __builtin_memcpy(&result.scale, &scale_bits, sizeof(float));
  __builtin_memcpy(&result.inverse, &inverse_bits, sizeof(float));
  return result;
}

// Where x_blocks has a row from unit k on.
inline float* UnitsOfX(const PanelJob& job, int64_t row, int64_t k) {
  return job.x_blocks + (k / job.k_block * job.rows + row) * kMaxKBlock + k % job.k_block;
}

// Where x_scales has a row from unit k on, a multiple of kScaleUnits.
inline float* ScalesOfX(const PanelJob& job, int64_t row, int64_t k) {
  return job.x_scales + (k / job.k_block * job.rows + row) * kMaxXScales +
         k % job.k_block / kScaleUnits;
}

// Where a part of a group's weights lies.
struct PanelPlace {
  const std::byte* weights;  // of the panel, at k_begin
  const std::byte* scales;   // of the panel, of k_begin's 32 weights; int8 only
  int64_t columns;           // of the group: units between one k and the next
};

// `k_begin` is a unit, a multiple of kScaleUnits.
inline PanelPlace FindPanel(const PanelWeights& w, int64_t lanes, int64_t panel, int64_t k_begin) {
  const int64_t width = 2 * lanes;
  const int64_t group_columns = GroupColumns(w.format);
  const int64_t first = panel * width / group_columns * group_columns;  // column of the group
  const int64_t in_group = panel * width - first;
  const int64_t left = DivideUp(w.n, width) * width - first;
  const int64_t columns = left < group_columns ? left : group_columns;
  const std::byte* group = w.data + first * PanelColumnBytes(w.format, w.k) +
                           columns * PanelColumnBytes(w.format, k_begin);
  if (w.format == PanelFormat::kInt8) {
    return {group + 2 * (columns + in_group), group + 2 * in_group, columns};
  }
  return {group + in_group * UnitBytes(w.format), nullptr, columns};
}

// Floats for a decoded panel and for the sums of an item.
inline int64_t ManyRowsScratchFloats(int64_t lanes, int64_t rows, int64_t panels) {
  return 2 * lanes * (kMaxKBlock + rows * panels);
}

}  // namespace
}  // namespace kvasir::kernels
