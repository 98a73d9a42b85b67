// The CPU implementation behind AppendKv. REQUIRES: what append.cc checks. Thread-compatible.
#pragma once

#include "kernels/base/executor.h"
#include "kernels/paged/append.h"

namespace kvasir::kernels {

void AppendKvCpu(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
