// Compiled for Arm; see the warning in attend_tile.h. The vectors are included before the functions
// that use them.
// clang-format off
#include "kernels/simd/simd_neon.h"
#include "kernels/attention/tile/attend_tile_simd.h"
// clang-format on

namespace kvasir::kernels {

void AddPageNeonFloat32(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<Float32Kv>(shape, page, rows);
}

void AddPageNeonBFloat16(const TileShape& shape, const TilePage& page, const TileRows& rows) {
  AddPage<BFloat16Kv>(shape, page, rows);
}

}  // namespace kvasir::kernels
