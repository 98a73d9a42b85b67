// The CPU implementations behind Attend: for attend.cc, which checks and chooses, and for tests,
// which compare them. REQUIRES of all: what attend.cc checks. Thread-compatible.
#pragma once

#include "kernels/attention/attend.h"

namespace kvasir::kernels {

// The truth: plain loops over one query and head at a time. Any head_dim, any group.
void AttendReference(const AttendParams& params, Executor& executor);

// INVALID_ARGUMENT unless `params` is what the implementations require.
absl::Status CheckAttendParams(const AttendParams& params);

}  // namespace kvasir::kernels
