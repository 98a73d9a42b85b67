// Which x86 instructions the running machine has, asked at run time: binaries are built for plain
// x86-64, and files that are compiled for more are entered only where this says so. Thread-safe.
#pragma once

namespace kvasir::kernels {

// With them comes F16C, which not every compiler can ask for.
inline bool CpuHasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

// Foundation, byte/word, doubleword/quadword and vector-length extensions: all server CPUs with
// AVX-512.
inline bool CpuHasAvx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

inline bool CpuHasAvx512Bf16() {
  return CpuHasAvx512() && __builtin_cpu_supports("avx512bf16") != 0;
}

// The widest of the three forms of a function that this machine can run.
template <typename Function>
Function* ChooseByCpu(Function* plain, Function* avx2, Function* avx512) {
  return CpuHasAvx512() ? avx512 : CpuHasAvx2() ? avx2 : plain;
}

}  // namespace kvasir::kernels
