// Internal to AppendKv: what its forms for the CPU and for the GPU check alike, and the CPU's.
// Thread-compatible.
#pragma once

#include "kernels/base/executor.h"
#include "kernels/paged/append.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT on shapes, dtypes and the layer.
absl::Status CheckAppendShapes(const AppendParams& params);

// REQUIRES: what append.cc checks.
void AppendKvCpu(const AppendParams& params, Executor& executor);

}  // namespace kvasir::kernels
