// The panel kernels over vectors, written once for all widths: each gemm_panel_<instruction set>.cc
// includes its simd_*.h, says how many registers hold sums, and then includes this:
//
//   kSumVectors   accumulators, so that weights and a broadcast x fit beside them
//
// gemm_panel.h explains layout and order of sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm_panel.h"
#include "kernels/gemm/gemm_panel_rows.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kPanelWidth = 2 * kSimdWidth;
constexpr int kTileRows = kSumVectors / 2;
constexpr int64_t kLineBytes = 64;

// Two weights that are neighbours in k, as they are kept and as they are multiplied.
struct Int8Pair {
  int8_t values[2];
};
struct Int16Pair {
  float bits;  // never computed with
};

// True for weights with scales.
template <typename T>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<Int8Pair> = true;
template <>
constexpr bool kScaled<Int16Pair> = true;

// Panels in a group of columns (GroupColumns).
template <typename T>
constexpr int kGroupPanels = static_cast<int>((kScaled<T> ? 64 : 32) / kPanelWidth);

// The units of a panel at one k, as two vectors.
inline void LoadPanel(const float* p, Vec& first, Vec& second) {
  first = Load(p);
  second = Load(p + kSimdWidth);
}
inline void LoadPanel(const uint16_t* p, Vec& first, Vec& second) { LoadPairs(p, first, second); }
inline void LoadPanel(const Int8Pair* p, Vec& first, Vec& second) {
  first = LoadAsInt16(p->values);
  second = LoadAsInt16(p[kSimdWidth].values);
}
inline void LoadPanel(const Int16Pair* p, Vec& first, Vec& second) {
  LoadPanel(&p->bits, first, second);
}

// The first argument tells the type of the weights.
inline Vec MulAdd(const void*, Vec x, Vec w, Vec sum) { return Fma(x, w, sum); }
inline Vec MulAdd(const Int8Pair*, Vec x, Vec w, Vec sum) { return AddProductsOfPairs(sum, x, w); }
inline Vec MulAdd(const Int16Pair*, Vec x, Vec w, Vec sum) { return AddProductsOfPairs(sum, x, w); }

// The type of a panel's weights once it is decoded.
template <typename T>
struct DecodedOf {
  using Type = float;
};
template <>
struct DecodedOf<Int8Pair> {
  using Type = Int16Pair;
};

// Memory to ask for while others are multiplied: one address for each k, or two neighbouring cache
// lines where a single pass has more than one at each k.
struct Ahead {
  const std::byte* next = nullptr;
  int64_t step = 0;  // bytes
};

// sums[row][column] += x[row][k] * w[k][column]
template <typename T>
struct Tile {
  const float* x;  // rows kMaxKBlock apart
  const T* weights;
  int64_t stride;  // units from one k to the next
  int64_t k;
  float* sums;
  int64_t sum_stride;
  // For int8: scales of x, in rows kMaxXScales apart; scales of the first kScaleUnits of k; the
  // elements from there to the scales of the next kScaleUnits; and the units that lie between the
  // weights of the two besides.
  const float* x_scales = nullptr;
  const uint16_t* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t gap = 0;
  Ahead ahead = {};  // where weights come from memory
};

template <int kRows, int kPanels>
struct Sums {
  Vec v[static_cast<size_t>(kRows)][static_cast<size_t>(2 * kPanels)];
};

template <int kRows, int kPanels>
inline void LoadSums(const float* from, int64_t stride, Sums<kRows, kPanels>& sums) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kPanels; ++v) sums.v[r][v] = Load(from + r * stride + v * kSimdWidth);
  }
}

template <int kRows, int kPanels>
inline void StoreSums(const Sums<kRows, kPanels>& sums, float* to, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kPanels; ++v) Store(to + r * stride + v * kSimdWidth, sums.v[r][v]);
  }
}

template <bool kAhead, typename T, int kRows, int kPanels>
inline void AddProducts(const float* x, const T* weights, int64_t stride, int64_t k, Ahead& ahead,
                        Sums<kRows, kPanels>& sums) {
  for (int64_t i = 0; i < k; ++i) {
    if (kAhead) {
      __builtin_prefetch(ahead.next);
      if constexpr (kPanels == kGroupPanels<T> && kPanels * kPanelWidth * sizeof(T) > kLineBytes) {
        __builtin_prefetch(ahead.next + kLineBytes);
      }
      ahead.next += ahead.step;
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      Vec first, second;
      LoadPanel(weights + p * kPanelWidth, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec value = Broadcast(x[r * kMaxKBlock]);
        sums.v[r][2 * p] = MulAdd(weights, value, first, sums.v[r][2 * p]);
        sums.v[r][2 * p + 1] = MulAdd(weights, value, second, sums.v[r][2 * p + 1]);
      }
    }
    weights += stride;
    ++x;
  }
}

// One chain over all k. Not inlined, here and below: in a larger function the compiler keeps sums
// in memory.
template <bool kAhead, typename T, int kRows, int kPanels>
__attribute__((noinline)) void RunChain(const Tile<T>& t) {
  Sums<kRows, kPanels> sums;
  LoadSums(t.sums, t.sum_stride, sums);
  Ahead ahead = t.ahead;
  AddProducts<kAhead>(t.x, t.weights, t.stride, t.k, ahead, sums);
  StoreSums(sums, t.sums, t.sum_stride);
}

// An exact sum for each pair of scales.
template <bool kAhead, typename T, int kRows, int kPanels>
__attribute__((noinline)) void RunScaled(const Tile<T>& t) {
  const T* weights = t.weights;
  const uint16_t* scales = t.scales;
  const float* x_scales = t.x_scales;
  Ahead ahead = t.ahead;
  for (int64_t begin = 0; begin < t.k; begin += kScaleUnits) {
    const int64_t k = t.k - begin < kScaleUnits ? t.k - begin : kScaleUnits;
    Sums<kRows, kPanels> sums;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kPanels; ++v) sums.v[r][v] = Broadcast(0);
    }
    AddProducts<kAhead>(t.x + begin, weights, t.stride, k, ahead, sums);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      Vec first, second;
      LoadPanel(scales + p * kPanelWidth, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec x_scale = Broadcast(x_scales[r * kMaxXScales]);
        float* total = t.sums + r * t.sum_stride + p * kPanelWidth;
        Store(total, Fma(FromInt32(sums.v[r][2 * p]), first * x_scale, Load(total)));
        total += kSimdWidth;
        Store(total, Fma(FromInt32(sums.v[r][2 * p + 1]), second * x_scale, Load(total)));
      }
    }
    weights += k * t.stride + t.gap;
    scales += t.scale_stride;
    ++x_scales;
  }
}

template <bool kAhead, typename T, int kRows, int kPanels>
inline void RunTile(const Tile<T>& t) {
  if constexpr (kScaled<T>) {
    RunScaled<kAhead, T, kRows, kPanels>(t);
  } else {
    RunChain<kAhead, T, kRows, kPanels>(t);
  }
}

// One panel, 1 .. kTileRows rows.
template <typename T, int kRows = kTileRows>
inline void RunRows(int64_t rows, const Tile<T>& t) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return RunRows<T, kRows - 1>(rows, t);
  }
  RunTile</*kAhead=*/false, T, kRows, 1>(t);
}

// Number of panels side by side that `rows` leave registers for: with few rows one panel has too
// few chains to hide how long an addition takes.
template <typename T>
constexpr int PanelsAtOnce(int rows) {
  int panels = kGroupPanels<T>;
  while (panels > 1 && 2 * rows * panels > kSumVectors) panels /= 2;
  return panels;
}

// kRows rows of `panels` panels that lie side by side in a group.
template <typename T, int kRows>
void RunPanelsOfRows(int64_t panels, Tile<T> t) {
  constexpr int kAtOnce = PanelsAtOnce<T>(kRows);
  const auto advance = [&t](int by) {
    t.weights += by * kPanelWidth;
    t.sums += by * kPanelWidth;
    t.ahead.next += t.k * t.ahead.step;
    if (kScaled<T>) t.scales += by * kPanelWidth;
  };
  for (; panels >= kAtOnce; panels -= kAtOnce) {
    RunTile</*kAhead=*/true, T, kRows, kAtOnce>(t);
    advance(kAtOnce);
  }
  for (; panels > 0; --panels) {
    RunTile</*kAhead=*/true, T, kRows, 1>(t);
    advance(1);
  }
}

template <typename T, int kRows = (kTileRows < kMaxFewRows ? kTileRows : kMaxFewRows)>
void RunPanels(int64_t rows, int64_t panels, const Tile<T>& t) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return RunPanels<T, kRows - 1>(rows, panels, t);
  }
  RunPanelsOfRows<T, kRows>(panels, t);
}

// Rows [begin, end) in tiles of about the same height.
template <typename Body>
inline void ForEachTile(int64_t begin, int64_t end, const Body& body) {
  for (int64_t tiles = DivideUp(end - begin, kTileRows); tiles > 0; --tiles) {
    const int64_t rows = (end - begin) / tiles;
    body(begin, rows);
    begin += rows;
  }
}

// Writes y[columns] = sums + bias, n columns of a row from `column` on.
template <typename T>
void FinishRow(const float* sums, const float* bias, T* y, int64_t n) {
  for (int64_t j = 0; j < n; j += kSimdWidth) {
    Vec v = Load(sums + j);
    if (bias != nullptr) v += Load(bias + j);
    if (j + kSimdWidth <= n) {
      Store(y + j, v);
    } else {
      StorePart(y + j, v, n - j);
    }
  }
}

void Finish(const PanelJob& job, const float* sums, int64_t stride, const PanelItem& item) {
  const int64_t column = item.panel_begin * kPanelWidth;
  const int64_t end = item.panel_end * kPanelWidth;
  const int64_t n = (end < job.weights.n ? end : job.weights.n) - column;
  const float* bias = job.weights.bias == nullptr ? nullptr : job.weights.bias + column;
  for (int64_t row = item.row_begin; row < item.row_end; ++row) {
    const int64_t at = row * job.weights.n + column;
    if (job.y_is_bfloat16) {
      FinishRow(sums, bias, reinterpret_cast<uint16_t*>(job.y) + at, n);
    } else {
      FinishRow(sums, bias, reinterpret_cast<float*>(job.y) + at, n);
    }
    sums += stride;
  }
}

// The weights of a panel from k_begin on, as they are stored.
template <typename T>
Tile<T> StoredTile(const PanelJob& job, int64_t panel, int64_t k_begin) {
  const PanelPlace place = FindPanel(job.weights, kSimdWidth, panel, k_begin);
  return {.x = nullptr,
          .weights = reinterpret_cast<const T*>(place.weights),
          .stride = place.columns,
          .k = BlockEnd(job, k_begin) - k_begin,
          .sums = nullptr,
          .sum_stride = 0,
          .scales = reinterpret_cast<const uint16_t*>(place.scales),
          // int8: scales and units, two bytes each, take turns.
          .scale_stride = place.columns + kScaleUnits * place.columns,
          .gap = place.columns};
}

// Number of times that the weights of a block are gone through for a tile of `rows`.
template <typename T>
inline int64_t NumPasses(int64_t rows, int64_t panels) {
  const int at_once = PanelsAtOnce<T>(static_cast<int>(rows));
  return panels / at_once + panels % at_once;
}

// The memory to ask for while the block of `t` is gone through: after a single pass what comes
// soon, after several the next block, evenly, for the processor by itself would ask for it only
// when the last of them has ended.
template <typename T>
inline Ahead AskAhead(const PanelJob& job, const Tile<T>& t, int64_t panels) {
  int64_t passes = 0;
  ForEachTile(0, job.rows, [&](int64_t, int64_t rows) { passes += NumPasses<T>(rows, panels); });
  const int64_t bytes = t.stride * PanelColumnBytes(job.weights.format, t.k);
  const auto* weights = reinterpret_cast<const std::byte*>(t.weights);
  return {weights + (passes == 1 ? job.ahead_bytes : bytes), bytes / (t.k * passes)};
}

template <typename T>
void FewRowsOf(const PanelJob& job, int64_t group_begin, int64_t group_end) {
  constexpr int64_t kPanels = kGroupPanels<T>;
  constexpr int64_t kGroupWidth = kPanels * kPanelWidth;
  alignas(64) float sums[static_cast<size_t>(kMaxFewRows * kGroupWidth)];
  const int64_t all_panels = DivideUp(job.weights.n, kPanelWidth);
  for (int64_t group = group_begin; group < group_end; ++group) {
    const int64_t first = group * kPanels;
    const int64_t panels = all_panels - first < kPanels ? all_panels - first : kPanels;
    for (int64_t i = 0; i < job.rows * kGroupWidth; i += kSimdWidth) Store(sums + i, Broadcast(0));
    for (int64_t k_begin = 0; k_begin < job.weights.k; k_begin += job.k_block) {
      Tile<T> t = StoredTile<T>(job, first, k_begin);
      t.sum_stride = kGroupWidth;
      t.ahead = AskAhead(job, t, panels);
      ForEachTile(0, job.rows, [&](int64_t row, int64_t rows) {
        t.x = UnitsOfX(job, row, k_begin);
        t.x_scales = ScalesOfX(job, row, k_begin);
        t.sums = sums + row * kGroupWidth;
        RunPanels<T>(rows, panels, t);
        t.ahead.next += NumPasses<T>(rows, panels) * t.k * t.ahead.step;
      });
    }
    Finish(job, sums, kGroupWidth,
           {.row_end = job.rows, .panel_begin = first, .panel_end = first + panels});
  }
}

void FewRows(const PanelJob& job, int64_t group_begin, int64_t group_end) {
  switch (job.weights.format) {
    case PanelFormat::kFloat32:
      return FewRowsOf<float>(job, group_begin, group_end);
    case PanelFormat::kBFloat16:
      return FewRowsOf<uint16_t>(job, group_begin, group_end);
    case PanelFormat::kBFloat16Pairs:
      return;  // gemm_panel_avx512_bf16.cc
    case PanelFormat::kInt8:
      return FewRowsOf<Int8Pair>(job, group_begin, group_end);
  }
}

// Writes a block of a panel as float32 [k][kPanelWidth]; int8 as int16, without its scales.
template <typename T>
void Decode(const Tile<T>& t, float* out) {
  const T* weights = t.weights;
  for (int64_t k = 0; k < t.k; ++k) {
    Vec first, second;
    LoadPanel(weights, first, second);
    Store(out + k * kPanelWidth, first);
    Store(out + k * kPanelWidth + kSimdWidth, second);
    weights += t.stride;
    if (kScaled<T> && (k + 1) % kScaleUnits == 0) weights += t.gap;
  }
}

template <typename T>
void ManyRowsOf(const PanelJob& job, const PanelItem& item, float* scratch) {
  using Decoded = typename DecodedOf<T>::Type;
  float* const decoded = scratch;
  float* const sums = scratch + kMaxKBlock * kPanelWidth;
  const int64_t width = (item.panel_end - item.panel_begin) * kPanelWidth;
  const int64_t all = (item.row_end - item.row_begin) * width;
  for (int64_t i = 0; i < all; i += kSimdWidth) Store(sums + i, Broadcast(0));
  for (int64_t k_begin = 0; k_begin < job.weights.k; k_begin += job.k_block) {
    for (int64_t panel = item.panel_begin; panel < item.panel_end; ++panel) {
      const Tile<T> stored = StoredTile<T>(job, panel, k_begin);
      Decode(stored, decoded);
      Tile<Decoded> t = {.x = nullptr,
                         .weights = reinterpret_cast<const Decoded*>(decoded),
                         .stride = kPanelWidth,
                         .k = stored.k,
                         .sums = nullptr,
                         .sum_stride = width,
                         .scales = stored.scales,
                         .scale_stride = stored.scale_stride};
      ForEachTile(item.row_begin, item.row_end, [&](int64_t row, int64_t rows) {
        t.x = UnitsOfX(job, row, k_begin);
        t.x_scales = ScalesOfX(job, row, k_begin);
        t.sums = sums + (row - item.row_begin) * width + (panel - item.panel_begin) * kPanelWidth;
        RunRows<Decoded>(rows, t);
      });
    }
  }
  Finish(job, sums, width, item);
}

void ManyRows(const PanelJob& job, const PanelItem& item, float* scratch) {
  switch (job.weights.format) {
    case PanelFormat::kFloat32:
      return ManyRowsOf<float>(job, item, scratch);
    case PanelFormat::kBFloat16:
      return ManyRowsOf<uint16_t>(job, item, scratch);
    case PanelFormat::kBFloat16Pairs:
      return;  // gemm_panel_avx512_bf16.cc
    case PanelFormat::kInt8:
      return ManyRowsOf<Int8Pair>(job, item, scratch);
  }
}

PanelKernels Kernels() {
  return {.lanes = kSimdWidth,
          .tile_rows = kTileRows,
          .pack_rows = PackRows,
          .few_rows = FewRows,
          .many_rows = ManyRows};
}

}  // namespace
}  // namespace kvasir::kernels
