// Internal to AppendKv: what does it, once all is checked. Thread-compatible.
#pragma once

#include "kernels/base/executor.h"
#include "kernels/paged/append.h"

namespace kvasir::kernels {

// REQUIRES: what append.cc checks.
void AppendKvCpu(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
