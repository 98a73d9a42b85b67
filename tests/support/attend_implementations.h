// The implementations of Attend that this machine can run, for tests that compare them.
#pragma once

#include <gtest/gtest.h>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/base/cpu_isa.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

struct AttendImplementation {
  std::string name;
  AttentionBatch::Implementation run;
  friend void PrintTo(const AttendImplementation& i, std::ostream* out) { *out << i.name; }
};

inline std::vector<AttendImplementation> AttendImplementations() {
  std::vector<AttendImplementation> all = {{"Reference", AttendReference}};
  const auto fast = [](AttendIsa isa) {
    return [isa](const AttendParams& p, Executor& executor) {
      if (p.kv.layout.head_dim % 64 != 0) return AttendReference(p, executor);
      const absl::Status status = AttendFast(p, isa, executor);
      ASSERT_TRUE(status.ok()) << status;
    };
  };
  if (CpuHas(CpuIsa::kAvx512)) all.push_back({"Avx512", fast(AttendIsa::kAvx512)});
  if (CpuHas(CpuIsa::kAvx512Bf16)) all.push_back({"Avx512Bf16", fast(AttendIsa::kAvx512Bf16)});
  return all;
}

}  // namespace kvasir::kernels
