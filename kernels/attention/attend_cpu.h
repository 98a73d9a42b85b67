// The CPU implementations of Attend, for attend.cc, which checks and chooses, and for tests, which
// compare them. All REQUIRE the conditions that attend.cc checks, and reserved positions
// (compact_positions.h). Thread-compatible.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/base/cpu_isa.h"

namespace kvasir::kernels {

// The reference: plain loops over one query and head at a time. Any head_dim, any group.
void AttendReference(const AttendParams& params, Executor& executor);

// The fast implementation: 64-token tiles in vector registers (attend_tile.h), for head dims that
// are multiples of 64 and any group. REQUIRES: the machine has `isa`, and HasFastAttend.
absl::Status AttendFast(const AttendParams& params, CpuIsa isa, Executor& executor);
// Whether AttendFast has a form for this instruction set and head_dim.
bool HasFastAttend(CpuIsa isa, int64_t head_dim);

// INVALID_ARGUMENT unless `params` meets the requirements of the implementations.
absl::Status CheckAttendParams(const AttendParams& params);

}  // namespace kvasir::kernels
