// A method that a reader might add: the newest pages before the window. added_method_test.cc adds
// it to the list of methods, and runs what is tested of all of them. Thread-compatible.
#pragma once

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class NewestSelector : public Selector {
 public:
  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return false; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
  GpuSupport SupportsGpu() const override { return {.runs = true}; }
};

}  // namespace kvasir::kernels
