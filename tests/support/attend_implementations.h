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
  for (const CpuIsa isa : {CpuIsa::kNeon, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (!CpuHas(isa)) continue;
    const auto fast = [isa](const AttendParams& p, Executor& executor) {
      if (!HasFastAttend(isa, p.kv.layout.head_dim)) return AttendReference(p, executor);
      const absl::Status status = AttendFast(p, isa, executor);
      ASSERT_TRUE(status.ok()) << status;
    };
    all.push_back({std::string(CpuIsaName(isa)), fast});
  }
  return all;
}

}  // namespace kvasir::kernels
