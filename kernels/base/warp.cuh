// Constants of a warp.
#pragma once

namespace kvasir::kernels {

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned kAllLanes = 0xffffffff;

}  // namespace kvasir::kernels
