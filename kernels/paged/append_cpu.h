// Internal to AppendKv: does the work after all checks. Thread-compatible.
#pragma once

#include "kernels/base/executor.h"
#include "kernels/paged/append.h"

namespace kvasir::kernels {

// REQUIRES: the conditions that append.cc checks.
void AppendKvCpu(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
