// The forms of a function that this machine can run, for tests that compare them.
#pragma once

#include <gtest/gtest.h>
#include <string>

#include "kernels/base/cpu_isa.h"

namespace kvasir::tests {

// Calls use(form) for each form over vectors.
template <typename Function, typename Use>
void ForEachVectorForm(const kernels::IsaForms<Function>& forms, const Use& use) {
  using kernels::CpuIsa;
  for (const CpuIsa isa : {CpuIsa::kNeon, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    Function* const form = kernels::FormFor(isa, forms);
    if (!kernels::CpuHas(isa) || form == forms.portable) continue;
    SCOPED_TRACE(std::string(kernels::CpuIsaName(isa)));
    use(form);
  }
}

}  // namespace kvasir::tests
