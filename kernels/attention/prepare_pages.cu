// Makes prepared pages (prepared_pages.h). A CTA has one page of one KV head: a thread decodes
// sixteen codes at a time, or rotates eight elements of each half of a key. The bits are those that
// attention's kernels make of the page themselves (code_pages.cuh, page_pipeline.cuh).
#include "kernels/attention/attend_launch.h"
#include "kernels/attention/page_pipeline.cuh"
#include "kernels/base/head_dim.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPart = 8;  // elements of sixteen bytes

// The form in which the KV is stored.
enum class Stored { kElements, kFloat8, kInt8 };

// Returns elements [element, element + 8) of row `row`. `rows` and `scales` are those of K or V.
template <int kHeadDim, Stored kStored>
__device__ uint4 LoadPart(const std::byte* rows, const std::byte* scales, int row, int element) {
  const int64_t at = int64_t{row} * kHeadDim + element;
  if constexpr (kStored == Stored::kElements) {
    return *reinterpret_cast<const uint4*>(rows + at * 2);
  } else {
    const uint2 codes = *reinterpret_cast<const uint2*>(rows + at);
    return CodeScale(static_cast<uint8_t>(scales[row]))
        .Of(DecodeEight<kStored == Stored::kInt8>(codes));
  }
}

// Returns the sequence of the CTA's page.
__device__ const PreparedSequence& MySequence(const PreparedPages& pages) {
  int32_t i = 0;
  while (i + 1 < pages.num_sequences &&
         static_cast<int32_t>(blockIdx.x) >= pages.sequences[i + 1].first_page) {
    ++i;
  }
  return pages.sequences[i];
}

// Returns where the page lies, null where it is absent, which sets the slot's fault. Records the
// read, by one thread.
__device__ const std::byte* FindPage(const AttendLaunch& p, int64_t slot, int64_t page,
                                     int64_t head) {
  const PageRef ref = p.kv.Peek(slot, page, p.layer, head);
  if (ref.tier() == PageTier::kAbsent) {
    if (threadIdx.x == 0) p.faults[slot] = 1;
    return nullptr;
  }
  if (threadIdx.x == 0) {
    RecordRead(p, p.kv.PageIndex(slot, page, p.layer, head), ref.tier(), kPageTokens);
  }
  return ref.page();
}

template <int kHeadDim, Stored kStored>
__global__ void __launch_bounds__(kThreads)
    PreparePagesKernel(const __grid_constant__ AttendLaunch p,
                       const __grid_constant__ PreparedPages pages, std::byte* memory) {
  const PreparedSequence& sequence = MySequence(pages);
  const int64_t page = blockIdx.x - sequence.first_page;
  const int64_t head = pages.first_head + blockIdx.y;
  const std::byte* const from = FindPage(p, sequence.slot, page, head);
  if (from == nullptr) return;
  constexpr int kRows = static_cast<int>(kPageTokens);
  constexpr int kRowParts = kHeadDim / kPart;
  constexpr int kHalf = kHeadDim / 2;
  const std::byte* const scales = from + p.kv.layout.scales_offset();
  auto* const keys = reinterpret_cast<uint4*>(memory + pages.Place(blockIdx.x, head) *
                                                           PageShape<kHeadDim>::kPageBytes);
  auto* const values = keys + kRows * kRowParts;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRowParts / 2; i += kThreads) {
    const int row = i / (kRowParts / 2);
    const int part = i % (kRowParts / 2);
    const int element = part * kPart;
    uint4 low = LoadPart<kHeadDim, kStored>(from, scales, row, element);
    uint4 high = LoadPart<kHeadDim, kStored>(from, scales, row, kHalf + element);
    // There are no angles of later positions.
    if (const int64_t position = page * kPageTokens + row;
        p.rope.on() && position < sequence.num_tokens) {
      RotateParts(p.rope, position * kHalf + element, low, high);
    }
    keys[row * kRowParts + part] = low;
    keys[row * kRowParts + kRowParts / 2 + part] = high;
  }
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRowParts; i += kThreads) {
    values[i] = LoadPart<kHeadDim, kStored>(from + p.kv.layout.v_offset(), scales + kRows,
                                            i / kRowParts, i % kRowParts * kPart);
  }
}

template <Stored kStored>
cudaError_t Launch(const AttendLaunch& p, const PreparedPages& pages, std::byte* memory,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(pages.num_pages), static_cast<unsigned>(pages.num_heads));
  ForHeadDim(p.kv.layout.head_dim, [&]<int kHeadDim>() {
    PreparePagesKernel<kHeadDim, kStored><<<grid, kThreads, 0, stream>>>(p, pages, memory);
  });
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPreparePages(const AttendLaunch& params, const PreparedPages& pages,
                               std::byte* memory, cudaStream_t stream) {
  switch (params.kv.layout.dtype) {
    case DType::kFloat8E4M3:
      return Launch<Stored::kFloat8>(params, pages, memory, stream);
    case DType::kInt8:
      return Launch<Stored::kInt8>(params, pages, memory, stream);
    default:
      return Launch<Stored::kElements>(params, pages, memory, stream);
  }
}

}  // namespace kvasir::kernels
