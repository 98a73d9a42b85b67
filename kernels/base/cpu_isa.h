// The instruction sets that CPU kernels come in, and the one they use. Binaries are built for the
// plain machine (x86-64, or Arm with NEON); files that are compiled for more are entered only where
// this says so.
//
// All kernels use one instruction set: the widest that the machine has, or the lower one that
// --cpu-isa or KVASIR_CPU_ISA asked for. Thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

// A function that exists in builds for that family of machines only; elsewhere a null pointer.
#if defined(__x86_64__)
#define KVASIR_ON_X86(function) (function)
#define KVASIR_ON_ARM(function) nullptr
#elif defined(__aarch64__)
#define KVASIR_ON_X86(function) nullptr
#define KVASIR_ON_ARM(function) (function)
#else
#define KVASIR_ON_X86(function) nullptr
#define KVASIR_ON_ARM(function) nullptr
#endif

namespace kvasir::kernels {

// In ascending order on one machine; a machine that has one has those of its family before it.
enum class CpuIsa : uint8_t {
  kPortable,    // plain C++
  kNeon,        // Arm: every 64-bit one
  kAvx2,        // x86: AVX2, FMA and F16C
  kAvx512,      // x86: AVX-512 F, BW, DQ and VL
  kAvx512Bf16,  // x86: products of bfloat16 pairs as well
};

// "portable", "neon", "avx2", "avx512", "avx512_bf16".
absl::string_view CpuIsaName(CpuIsa isa);

bool CpuHas(CpuIsa isa);
// The widest that the machine has.
CpuIsa MachineCpuIsa();

// The one in use: MachineCpuIsa() unless LimitCpuIsa or the environment variable KVASIR_CPU_ISA
// said less. Kernels that have no form for it use the next lower one.
CpuIsa ChosenCpuIsa();

// Makes kernels use `name`, or the widest again for "auto". For the start of a process and for
// tests, while no kernel runs: weights that were packed before stay as they are.
// INVALID_ARGUMENT: no such name, or the machine lacks it; the message lists those it has.
absl::Status LimitCpuIsa(absl::string_view name);

// The forms of one function; null: there is none.
template <typename Function>
struct IsaForms {
  Function* portable = nullptr;
  Function* neon = nullptr;
  Function* avx2 = nullptr;
  Function* avx512 = nullptr;
  Function* avx512_bf16 = nullptr;
};

// The form for `isa`, or the widest one below it; null where there is none.
template <typename Function>
Function* FormFor(CpuIsa isa, const IsaForms<Function>& forms) {
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
      if (forms.avx512_bf16 != nullptr) return forms.avx512_bf16;
      [[fallthrough]];
    case CpuIsa::kAvx512:
      if (forms.avx512 != nullptr) return forms.avx512;
      [[fallthrough]];
    case CpuIsa::kAvx2:
      return forms.avx2 != nullptr ? forms.avx2 : forms.portable;
    case CpuIsa::kNeon:
      return forms.neon != nullptr ? forms.neon : forms.portable;
    case CpuIsa::kPortable:
      return forms.portable;
  }
  return forms.portable;
}

// The form for the instruction set in use.
template <typename Function>
Function* ChooseForm(const IsaForms<Function>& forms) {
  return FormFor(ChosenCpuIsa(), forms);
}

}  // namespace kvasir::kernels
