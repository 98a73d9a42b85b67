// The selector `all`: attends to every earlier token, which is exact dense attention. Numbers are
// ignored. Thread-compatible.
#pragma once

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class AllSelector : public Selector {
 public:
  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers&, int64_t) const override { return 0; }
  bool ReadsQueries() const override { return false; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }  // skips nothing
  GpuSupport SupportsGpu() const override { return {.runs = true}; }
};

}  // namespace kvasir::kernels
