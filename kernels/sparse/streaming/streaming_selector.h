// The selector `streaming` (StreamingLLM, arXiv 2309.17453, at native positions): sink and window
// only. Nothing between them is ever read. The budget is ignored. Thread-compatible.
#pragma once

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class StreamingSelector : public Selector {
 public:
  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers&, int64_t) const override { return 0; }
  bool ReadsQueries() const override { return false; }
  SkipReason skip_reason() const override { return SkipReason::kWindow; }
  GpuSupport SupportsGpu() const override { return {.runs = true}; }
};

}  // namespace kvasir::kernels
