// What the GPU did in a stretch of a benchmark, as CUPTI records it: how long kernels ran, which,
// and how long none did. Recording delays the host a little, so time is taken without it. Called by
// benchmarks on one thread, for one device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::tests {

struct DeviceWork {
  struct Kernel {
    std::string name;
    int64_t count = 0;
    double ms = 0;  // sum
  };
  // A stretch without any kernel, between two.
  struct Wait {
    double ms = 0;
    std::string after, before;  // kernels
  };

  double ms = 0;                // from the first kernel's beginning to the last one's end
  double busy_ms = 0;           // part of it in which a kernel ran
  std::vector<Kernel> kernels;  // longest sum first
  std::vector<Wait> waits;      // longest first
};

// Ends the program where CUPTI refuses.
void BeginDeviceTrace();
// Waits for the device.
DeviceWork EndDeviceTrace();

// Prints `work`: a line with its times, then a line for each kernel and each wait that counts.
void PrintDeviceWork(const DeviceWork& work);

}  // namespace kvasir::tests
