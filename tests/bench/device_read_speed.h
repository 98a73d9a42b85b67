// How fast this process's GPU reads its own memory: the yardstick of benchmarks whose work is
// reading, measured in the same run. Errors end the program.
#pragma once

namespace kvasir::kernels {

// Bytes a second of a plain kernel that reads 2 GiB, many times what caches hold; the median of
// some runs. Takes the memory for the time of the call.
double DeviceReadBytesPerSecond();

}  // namespace kvasir::kernels
