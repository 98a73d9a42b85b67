// Internal to AppendKv: does the work after all checks. Thread-compatible.
#pragma once

#include "kernels/append/append.h"
#include "kernels/base/executor.h"

namespace kvasir::kernels {

// REQUIRES: the conditions that append.cc checks.
void AppendKvCpu(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
