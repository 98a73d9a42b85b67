// The instruction sets that CPU kernels are compiled for, and the one in use. Binaries are built
// for the plain machine (x86-64, or Arm with NEON). Files compiled for a wider set are entered only
// where this header allows it.
//
// All kernels use one instruction set: the fastest of the machine, or the one that --cpu-isa or
// KVASIR_CPU_ISA asked for. Thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

// A function that exists only in builds for this family of machines, a null pointer elsewhere.
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

// Ascending on one machine: a machine that has a set has all earlier ones of its family.
enum class CpuIsa : uint8_t {
  kPortable,    // plain C++
  kNeon,        // Arm: every 64-bit machine
  kAvx2,        // x86: AVX2, FMA and F16C
  kAvx512,      // x86: AVX-512 F, BW, DQ and VL
  kAvx512Bf16,  // x86: also products of bfloat16 pairs
};

// "portable", "neon", "avx2", "avx512", "avx512_bf16".
absl::string_view CpuIsaName(CpuIsa isa);

bool CpuHas(CpuIsa isa);
// Returns the fastest set of the machine: the widest, except that products of bfloat16 pairs are
// left out on Intel's processors without AMX.
CpuIsa MachineCpuIsa();

// Returns the set in use: MachineCpuIsa(), or the one given by LimitCpuIsa or the environment
// variable KVASIR_CPU_ISA. A kernel without a form for it uses its next lower form.
CpuIsa ChosenCpuIsa();

// Makes kernels use `name`, or the fastest set again for "auto". Called at the start of a process
// and in tests, while no kernel runs. Weights that are already packed keep their form.
// INVALID_ARGUMENT when the name is unknown or the machine lacks the set; the message lists the
// sets it has.
absl::Status LimitCpuIsa(absl::string_view name);

// The forms of one function, null where it has none.
template <typename Function>
struct IsaForms {
  Function* portable = nullptr;
  Function* neon = nullptr;
  Function* avx2 = nullptr;
  Function* avx512 = nullptr;
  Function* avx512_bf16 = nullptr;
};

// Returns the form for `isa`, or else the widest form below it, or null.
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

// Returns the form for the instruction set in use.
template <typename Function>
Function* ChooseForm(const IsaForms<Function>& forms) {
  return FormFor(ChosenCpuIsa(), forms);
}

}  // namespace kvasir::kernels
