// Which x86 instructions the running machine has, asked at run time: binaries are built for plain
// x86-64, and the files compiled for more (*_avx2.cc, *_avx512.cc) are entered only where this says
// so.
#pragma once

namespace kvasir::kernels {

inline bool CpuHasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

inline bool CpuHasAvx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

// The widest of the three forms of a function that this machine can run.
template <typename Function>
Function* ChooseByCpu(Function* plain, Function* avx2, Function* avx512) {
  return CpuHasAvx512() ? avx512 : CpuHasAvx2() ? avx2 : plain;
}

}  // namespace kvasir::kernels
