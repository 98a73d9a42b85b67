// Measures how fast this process's GPU reads its own memory: the yardstick, in the same run, of
// benchmarks whose work is reading. Errors end the program.
#pragma once

namespace kvasir::kernels {

// Returns bytes per second of a plain kernel that reads 2 GiB, many times the size of the caches:
// the median of some runs. Allocates the memory for the time of the call.
double DeviceReadBytesPerSecond();

}  // namespace kvasir::kernels
