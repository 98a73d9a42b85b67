#include "kernels/base/cpu_isa.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

constexpr std::array kAll = {CpuIsa::kPortable, CpuIsa::kNeon, CpuIsa::kAvx2, CpuIsa::kAvx512,
                             CpuIsa::kAvx512Bf16};

absl::StatusOr<CpuIsa> ParseCpuIsa(absl::string_view name) {
  if (name == "auto" || name.empty()) return MachineCpuIsa();
  std::vector<absl::string_view> names = {"auto"};
  for (const CpuIsa isa : kAll) {
    if (!CpuHas(isa)) continue;
    if (CpuIsaName(isa) == name) return isa;
    names.push_back(CpuIsaName(isa));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cpu-isa is '", name, "'; this machine takes ", absl::StrJoin(names, ", ")));
}

// Returns the choice of KVASIR_CPU_ISA. A wrong value ends the process, which has started nothing
// yet.
CpuIsa FromEnvironment() {
  const char* name = std::getenv("KVASIR_CPU_ISA");
  const absl::StatusOr<CpuIsa> isa = ParseCpuIsa(name == nullptr ? "auto" : name);
  if (isa.ok()) return *isa;
  std::fprintf(stderr, "%s\n", std::string(isa.status().message()).c_str());
  std::exit(2);
}

#if defined(__x86_64__)
bool HasMatrixUnits() {
  constexpr unsigned kAmxBf16 = 1u << 22;  // of EDX, leaf 7
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0;
}
#endif

// Intel's vector units multiply pairs of bfloat16 no faster than AVX2 multiplies floats (decision
// 0013). Where Intel has AMX, products use that, and need this set.
bool MultipliesPairsFast() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") == 0 || HasMatrixUnits();
#else
  return false;
#endif
}

std::atomic<CpuIsa>& Chosen() {
  static std::atomic<CpuIsa> chosen = FromEnvironment();
  return chosen;
}

}  // namespace

absl::string_view CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kNeon:
      return "neon";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

bool CpuHas(CpuIsa isa) {
#if defined(__x86_64__)
  const auto has_avx512 = [] {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  };
  switch (isa) {
    case CpuIsa::kPortable:
      return true;
    case CpuIsa::kNeon:
      return false;
    case CpuIsa::kAvx2:  // F16C comes with them; not every compiler can ask for it
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    case CpuIsa::kAvx512:
      return has_avx512();
    case CpuIsa::kAvx512Bf16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16") != 0;
  }
  return false;
#elif defined(__aarch64__)
  return isa == CpuIsa::kPortable || isa == CpuIsa::kNeon;
#else
  return isa == CpuIsa::kPortable;
#endif
}

CpuIsa MachineCpuIsa() {
  CpuIsa fastest = CpuIsa::kPortable;
  for (const CpuIsa isa : kAll) {
    if (CpuHas(isa) && (isa != CpuIsa::kAvx512Bf16 || MultipliesPairsFast())) fastest = isa;
  }
  return fastest;
}

CpuIsa ChosenCpuIsa() { return Chosen().load(std::memory_order_relaxed); }

absl::Status LimitCpuIsa(absl::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const CpuIsa isa, ParseCpuIsa(name));
  Chosen().store(isa, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
