// Speed of paging on the GPU at the 8B shape (pages of 32 KiB, 256 per block): the cost of a step's
// end, and how fast pages move between device and host memory, alone and beside decode attention
// over pages in device memory, against plain copies of the same number of bytes in the same run.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

#include "kernels/attention/attend_cuda.h"
#include "kernels/residency/residency_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "tests/bench/cuda_timing.h"

namespace kvasir::kernels {
namespace {

constexpr KvLayout kLayout = {
    .num_layers = 32, .num_kv_heads = 8, .head_dim = 128, .dtype = DType::kBFloat16};
constexpr int64_t kGroup = 4;
constexpr int64_t kFills = 2048;  // 64 MiB
constexpr int64_t kHostRows = 256;
constexpr int64_t kDeviceRows = 64;
constexpr int64_t kSealedRows = 8;        // a prefill chunk of 512 tokens
constexpr int64_t kMillionRows = 16384;   // 1M tokens
constexpr int64_t kAttentionCalls = 64;   // during a copy
constexpr int64_t kAttendedBlocks = 512;  // 32K tokens, one layer

void Report(const char* what, double us, int64_t bytes) {
  std::printf("| %s | %.1f | %.1f |\n", what, us, static_cast<double>(bytes) / us / 1e3);
  std::fflush(stdout);
}

// Two tiers with their state.
struct Tiers {
  PinnedBuffer extents;
  DeviceBuffer arena, memory, gathered;
  ResidencyState state;

  Tiers(int64_t rows, int64_t device_rows, bool has_pages) {
    const int64_t block = kLayout.block_bytes();
    if (has_pages) {
      extents = Value(PinnedBuffer::Allocate(rows * block));
      arena = Value(DeviceBuffer::Allocate(device_rows * block));
    }
    gathered = Value(DeviceBuffer::Allocate(8 * block));
    ResidencyShape shape = {.num_extents = rows,
                            .pages_per_extent = kLayout.pages_per_block(),
                            .num_slots = device_rows * kLayout.pages_per_block(),
                            .page_bytes = kLayout.page_bytes(),
                            .arena = arena.data(),
                            .extents = extents.data(),
                            .extent_stride = block,
                            .max_fills = kFills,
                            .max_examined = 16 * kFills};
    Check(CheckResidencyShape(shape));
    memory = Value(DeviceBuffer::Allocate(LayOutResidency(shape, nullptr).bytes));
    state = LayOutResidency(shape, memory.data());
    Check(InitResidency(state, nullptr));
  }
  // Opens and seals all rows, so that the last ones are in the device tier.
  void SealAll() {
    for (int32_t row = 0; row < state.shape.num_extents; ++row) {
      const DeviceBuffer rows = Upload(std::vector<int32_t>{row});
      const std::span<const int32_t> span(rows.As<int32_t>(), 1);
      Check(OpenExtents(state, span, nullptr));
      Check(CopyToHost(std::span(&row, 1), nullptr));
      Check(SealExtents(state, span, nullptr));
      Check(cudaDeviceSynchronize());
    }
  }
  absl::Status CopyToHost(std::span<const int32_t> rows, cudaStream_t stream) {
    return CopyExtentsToHost(state, rows,
                             {gathered.data(), static_cast<size_t>(gathered.size_bytes())}, stream);
  }
  // Plans the most fills that a step may have.
  void PlanMany(uint32_t step) {
    Check(MapFills(state, nullptr));
    Check(cudaMemset(state.missed_bytes, 0x11,
                     static_cast<size_t>(state.shape.num_pages()) * sizeof(uint32_t)));
    Check(PlanFills(state, step, nullptr));
    ResidencyCounters counters;
    Check(cudaMemcpy(&counters, state.counters, sizeof(counters), cudaMemcpyDeviceToHost));
    if (counters.num_fills != kFills) Check(absl::InternalError("not all fills were planned"));
  }
};

// Dense decode attention of one query over its own pages.
struct Attention {
  DeviceBuffer pages, table, rows, q, out, workspace, arrivals, blocks, headers, faults;
  KvTensorMaps maps;
  CudaAttendParams params;

  Attention() {
    KvLayout layout = kLayout;
    layout.num_layers = 1;
    const int64_t bytes = kAttendedBlocks * layout.block_bytes();
    const int64_t heads = layout.num_kv_heads;
    pages = Value(DeviceBuffer::Allocate(bytes));
    Check(cudaMemset(pages.data(), 0, static_cast<size_t>(bytes)));
    std::vector<PageRef> refs;
    for (int64_t i = 0; i < kAttendedBlocks * heads; ++i) {
      refs.emplace_back(pages.data() + i * layout.page_bytes(), PageTier::kDevice);
    }
    table = Upload(refs);
    std::vector<int32_t> numbers(kAttendedBlocks);
    std::iota(numbers.begin(), numbers.end(), 0);
    rows = Upload(numbers);
    maps = Value(MakeKvTensorMaps(layout, {.base = pages.data(), .bytes = bytes}, {}));
    const QueryTile query = {.slot = 0,
                             .first_row = 0,
                             .num_rows = 1,
                             .first_position = kAttendedBlocks * kPageTokens - 1};
    blocks = Upload(std::vector<QueryTile>{query});
    headers =
        Upload(std::vector<SelectionHeader>(static_cast<size_t>(heads), MakeAllHeader(query)));
    q = Upload(std::vector<uint16_t>(static_cast<size_t>(heads * kGroup * layout.head_dim)));
    out = Upload(std::vector<uint16_t>(static_cast<size_t>(heads * kGroup * layout.head_dim)));
    faults = Upload(std::vector<uint8_t>{0});
    workspace = Value(DeviceBuffer::Allocate(AttendDecodeWorkspaceBytes(layout, 1, kGroup)));
    const int64_t arrival_bytes = layout.num_kv_heads * static_cast<int64_t>(sizeof(uint32_t));
    arrivals = Value(DeviceBuffer::Allocate(arrival_bytes));
    Check(CudaStatus(cudaMemset(arrivals.data(), 0, static_cast<size_t>(arrival_bytes)),
                     "clearing arrivals"));
    const auto tensor = [&](const DeviceBuffer& buffer) {
      return TensorView(buffer.data(), DType::kBFloat16, {1, heads * kGroup, layout.head_dim},
                        Device::kCuda);
    };
    params = {{.q = tensor(q),
               .out = tensor(out),
               .lse = {},
               .kv = {.layout = layout,
                      .block_extents = rows.As<int32_t>(),
                      .num_slots = 1,
                      .max_blocks_per_slot = kAttendedBlocks,
                      .num_extents = kAttendedBlocks,
                      .pages = table.As<PageRef>(),
                      .accesses = {}},
               .scale = 0.0883883476f,
               .tiles = {blocks.As<QueryTile>(), 1},
               .selection = {.headers = headers.As<SelectionHeader>(), .num_rows = heads},
               .faults = {faults.As<uint8_t>(), 1}}};
  }
  void Run(cudaStream_t stream) {
    for (int64_t i = 0; i < kAttentionCalls; ++i) {
      Check(AttendDecode(params, maps, workspace.data(),
                         {arrivals.As<uint32_t>(), static_cast<size_t>(params.selection.num_rows)},
                         stream));
    }
  }
};

// Median times of two kinds of work that run at the same time.
struct Beside {
  double first = 0;
  double second = 0;
};
Beside MeasureBeside(const std::function<void(cudaStream_t)>& first,
                     const std::function<void(cudaStream_t)>& second) {
  cudaStream_t streams[2];
  cudaEvent_t begins[2], ends[2];
  for (int i = 0; i < 2; ++i) {
    Check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    Check(cudaEventCreate(&begins[i]));
    Check(cudaEventCreate(&ends[i]));
  }
  std::vector<double> times[2];
  for (int replay = 0; replay < kReplays + kWarmUps; ++replay) {
    for (int i = 0; i < 2; ++i) {
      Check(cudaEventRecord(begins[i], streams[i]));
      (i == 0 ? first : second)(streams[i]);
      Check(cudaEventRecord(ends[i], streams[i]));
    }
    Check(cudaDeviceSynchronize());
    for (int i = 0; i < 2; ++i) {
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begins[i], ends[i]));
      if (replay >= kWarmUps) times[i].push_back(1000.0 * static_cast<double>(milliseconds));
    }
  }
  for (auto& of : times) std::sort(of.begin(), of.end());
  return {.first = times[0][times[0].size() / 2], .second = times[1][times[1].size() / 2]};
}

void BenchStepEnd() {
  Tiers million(kMillionRows, kMillionRows / 4, /*has_pages=*/false);
  const int64_t scanned = million.state.shape.num_pages() * 8;
  Report("end of a step at 1M tokens: map, plan (nothing to move)",
         MedianMicroseconds([&](cudaStream_t stream) {
           Check(MapFills(million.state, stream));
           Check(PlanFills(million.state, 1, stream));
         }),
         scanned);
}

void BenchCopies() {
  Tiers tiers(kHostRows, kDeviceRows, /*has_pages=*/true);
  tiers.SealAll();
  tiers.PlanMany(1);
  const int64_t bytes = kFills * kLayout.page_bytes();
  const auto copy = [&](cudaStream_t stream) {
    Check(cudaMemcpyAsync(tiers.arena.data(), tiers.extents.data(), static_cast<size_t>(bytes),
                          cudaMemcpyHostToDevice, stream));
  };
  const auto fill = [&](cudaStream_t stream) { Check(CopyFills(tiers.state, stream)); };
  Report("plain copy to the device", MedianMicroseconds(copy), bytes);
  Report("2,048 pages to the device", MedianMicroseconds(fill), bytes);
  std::vector<int32_t> last(kSealedRows);
  std::iota(last.begin(), last.end(), static_cast<int32_t>(kHostRows - kSealedRows));
  const int64_t sealed_bytes = kSealedRows * kLayout.block_bytes();
  Report(
      "plain copy to the host", MedianMicroseconds([&](cudaStream_t stream) {
        Check(cudaMemcpyAsync(tiers.extents.data(), tiers.arena.data(),
                              static_cast<size_t>(sealed_bytes), cudaMemcpyDeviceToHost, stream));
      }),
      sealed_bytes);
  Report("8 blocks to the host",
         MedianMicroseconds([&](cudaStream_t stream) { Check(tiers.CopyToHost(last, stream)); }),
         sealed_bytes);

  Attention attention;
  const auto attend = [&](cudaStream_t stream) { attention.Run(stream); };
  const int64_t read = kAttentionCalls * kAttendedBlocks * 8 * kLayout.page_bytes();
  Report("64 decode attentions over 32K tokens alone", MedianMicroseconds(attend), read);
  const Beside filling = MeasureBeside(fill, attend);
  Report("2,048 pages to the device, beside attention", filling.first, bytes);
  Report("64 decode attentions, beside these pages", filling.second, read);
  const Beside copying = MeasureBeside(copy, attend);
  Report("plain copy to the device, beside attention", copying.first, bytes);
  Report("64 decode attentions, beside a plain copy", copying.second, read);
}

}  // namespace
}  // namespace kvasir::kernels

int main() {
  std::printf("| what | us | GB/s |\n|---|---|---|\n");
  kvasir::kernels::BenchStepEnd();
  kvasir::kernels::BenchCopies();
}
