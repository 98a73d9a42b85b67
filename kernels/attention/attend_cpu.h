// The CPU implementations behind Attend: for attend.cc, which checks and chooses, and for tests,
// which compare them. REQUIRES of all: what attend.cc checks; positions are reserved
// (compact_positions.h). Thread-compatible.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/base/cpu_isa.h"

namespace kvasir::kernels {

// The truth: plain loops over one query and head at a time. Any head_dim, any group.
void AttendReference(const AttendParams& params, Executor& executor);

// The fast one: 64-token tiles in vector registers (attend_tile.h), for head dims that are
// multiples of 64 and any group. REQUIRES: the machine has `isa`, and HasFastAttend.
absl::Status AttendFast(const AttendParams& params, CpuIsa isa, Executor& executor);
// Whether AttendFast has a form of this instruction set, for this head_dim.
bool HasFastAttend(CpuIsa isa, int64_t head_dim);

// INVALID_ARGUMENT unless `params` is what the implementations require.
absl::Status CheckAttendParams(const AttendParams& params);

}  // namespace kvasir::kernels
