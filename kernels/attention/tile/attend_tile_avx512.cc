// Compiled for AVX-512; see the warning in attend_tile.h. The vectors are included before the
// functions that use them.
// clang-format off
#include "kernels/simd/simd_avx512.h"
#include "kernels/attention/tile/attend_tile_simd.h"
// clang-format on

namespace kvasir::kernels {

void AddPageAvx512Float32(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<Float32Kv>(shape, page, rows);
}

void AddPageAvx512BFloat16(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<BFloat16Kv>(shape, page, rows);
}

}  // namespace kvasir::kernels
