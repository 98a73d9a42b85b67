// Which x86 instructions the running machine has, asked at run time: binaries are built for plain
// x86-64, and the *_cpu_fast.cc files are compiled for AVX2 and entered only where this says so.
#pragma once

namespace kvasir::kernels {

inline bool CpuHasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

}  // namespace kvasir::kernels
