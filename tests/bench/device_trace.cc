#include "tests/bench/device_trace.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <cxxabi.h>
#include <map>
#include <memory>

namespace kvasir::tests {
namespace {

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr size_t kAlignment = 8;
constexpr double kLeastShare = 0.002;  // of the time, for a line of its own
constexpr size_t kMostWaits = 12;
constexpr size_t kLongestName = 90;

struct Span {
  uint64_t begin = 0, end = 0;  // ns
  const char* name = nullptr;   // CUPTI keeps it
};

std::vector<Span>& Spans() {
  static std::vector<Span> spans;
  return spans;
}

void Check(CUptiResult result) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = "";
  cuptiGetResultString(result, &text);
  std::fprintf(stderr, "CUPTI: %s\n", text);
  std::exit(1);
}

void CUPTIAPI GiveBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, kBufferBytes));
  *size = kBufferBytes;
  *max_records = 0;
}

void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    Spans().push_back({.begin = kernel->start, .end = kernel->end, .name = kernel->name});
  }
  std::free(buffer);
}

double Milliseconds(uint64_t ns) { return 1e-6 * static_cast<double>(ns); }

// Without namespaces and arguments.
std::string ShortName(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> whole(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? whole.get() : mangled;
  for (const char* const space : {"kvasir::kernels::", "(anonymous namespace)::", "void "}) {
    for (size_t at = name.find(space); at != std::string::npos; at = name.find(space)) {
      name.erase(at, std::string(space).size());
    }
  }
  name = name.substr(0, name.find('('));
  return name.substr(0, kLongestName);
}

}  // namespace

void BeginDeviceTrace() {
  cudaDeviceSynchronize();
  Spans().clear();
  Check(cuptiActivityRegisterCallbacks(GiveBuffer, TakeBuffer));
  Check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
}

DeviceWork EndDeviceTrace() {
  cudaDeviceSynchronize();
  Check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
  Check(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
  std::vector<Span>& spans = Spans();
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  DeviceWork work;
  if (spans.empty()) return work;
  std::map<std::string, DeviceWork::Kernel> kernels;
  Span reached = spans.front();  // the span that ends last so far
  for (const Span& span : spans) {
    const std::string name = ShortName(span.name);
    DeviceWork::Kernel& kernel = kernels[name];
    kernel.name = name;
    ++kernel.count;
    kernel.ms += Milliseconds(span.end - span.begin);
    if (span.begin > reached.end) {
      work.waits.push_back({.ms = Milliseconds(span.begin - reached.end),
                            .after = ShortName(reached.name),
                            .before = name});
    }
    if (span.end > reached.end) reached = span;
  }
  work.ms = work.busy_ms = Milliseconds(reached.end - spans.front().begin);
  for (const DeviceWork::Wait& wait : work.waits) work.busy_ms -= wait.ms;
  for (auto& [name, kernel] : kernels) work.kernels.push_back(kernel);
  std::sort(work.kernels.begin(), work.kernels.end(),
            [](const auto& a, const auto& b) { return a.ms > b.ms; });
  std::sort(work.waits.begin(), work.waits.end(),
            [](const auto& a, const auto& b) { return a.ms > b.ms; });
  return work;
}

void PrintDeviceWork(const DeviceWork& work) {
  std::printf("device: %.1f ms, busy %.1f, %zu waits of %.1f ms in all\n", work.ms, work.busy_ms,
              work.waits.size(), work.ms - work.busy_ms);
  for (const DeviceWork::Kernel& kernel : work.kernels) {
    if (kernel.ms < kLeastShare * work.ms) break;
    std::printf("  %9.2f ms %6lld x %s\n", kernel.ms, static_cast<long long>(kernel.count),
                kernel.name.c_str());
  }
  for (size_t i = 0; i < std::min(work.waits.size(), kMostWaits); ++i) {
    const DeviceWork::Wait& wait = work.waits[i];
    std::printf("  wait of %.3f ms after %s, before %s\n", wait.ms, wait.after.c_str(),
                wait.before.c_str());
  }
}

}  // namespace kvasir::tests
