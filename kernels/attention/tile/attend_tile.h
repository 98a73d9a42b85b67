// The inner kernel of CPU attention: one page of K and V against all query rows of one (query tile,
// KV head). attend_cpu_fast.cc walks pages and merges segments. These functions do the arithmetic.
// They are compiled for each instruction set (attend_tile_simd.h) and entered only where the
// machine has it.
//
// Files compiled with instructions that the machine may lack include this header. It must not bring
// in functions that the linker could share with the rest of the program, so it uses only <cstdint>
// and plain data. Thread-safe.
//
// A row's result depends only on its query, its tokens and its state: every row goes through the
// same operations in the same order, whatever the number of rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

inline constexpr int64_t kTileTokens = 64;  // a page
inline constexpr int64_t kTileLanes = 16;   // lanes in which a row's weights are summed

// Rows are queries x group, group fastest: row r is query r / group.
struct TileRows {
  const void* q = nullptr;  // [rows, head_dim], of the function's query type
  int64_t num_queries = 0;
  int64_t group = 0;
  float* max = nullptr;   // [rows], of the scaled logits; -inf before the first token
  float* sums = nullptr;  // [rows, kTileLanes], sum of exp(logit - max) by lanes
  float* out = nullptr;   // [rows, head_dim], un-normalised
};

struct TilePage {
  const std::byte* keys = nullptr;       // [kTileTokens, head_dim], of the function's KV type
  const std::byte* values = nullptr;     // likewise
  const std::byte* next_page = nullptr;  // keys then values of the next page; null: unknown
  uint64_t mask = 0;                     // tokens that may be attended to
  // Causality: query i attends to tokens up to first_query + i of the page.
  int64_t first_query = 0;
};

struct TileShape {
  int64_t head_dim = 0;  // a multiple of kTileHeadDimStep
  float scale = 0;
  std::byte* workspace = nullptr;  // TileWorkspaceBytes(head_dim), 64-byte aligned
};

inline constexpr int64_t kTileHeadDimStep = 64;

// Packed keys, packed values and weights, at most in float.
constexpr int64_t TileWorkspaceBytes(int64_t head_dim) {
  return 4 * (2 * kTileTokens * head_dim + 8 * kTileTokens);
}

// Adds the page's tokens to the rows' states. exp is accurate to 2 units in the last place.
using AddPageFn = void(const TileShape& shape, const TilePage& page, const TileRows& rows);

// Float32 arithmetic throughout: float32 queries; keys and values are converted to float32. All
// instruction sets give the same bits.
AddPageFn AddPageNeonFloat32;  // float32 KV
AddPageFn AddPageAvx2Float32;
AddPageFn AddPageAvx512Float32;
AddPageFn AddPageNeonBFloat16;  // bfloat16 KV
AddPageFn AddPageAvx2BFloat16;
AddPageFn AddPageAvx512BFloat16;

// Bfloat16 queries and KV: products of bfloat16 pairs are summed in float32. The weights exp(l -
// max) are rounded to bfloat16 for the product with V (their sum is not).
AddPageFn AddPageAvx512Bf16Pairs;

}  // namespace kvasir::kernels
