// The residency protocol on the GPU. Work that must follow an order (which slots are taken, where
// CLOCK's hand stops) is done by one CTA, a window of entries at a time: each thread examines one
// entry, a sum over the threads gives the entry its place, and entries after the last wanted one
// stay unchanged. So the state equals that of residency_cpu.cc, whatever the timing.
#include <algorithm>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/warp.cuh"
#include "kernels/residency/residency_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 1024;  // of a CTA that keeps an order
constexpr int kRowThreads = 256;
constexpr int kScanThreads = 256;
constexpr int kLaneLoads = 8;  // of 16 bytes, in flight
constexpr int64_t kPieceBytes = kWarpThreads * kLaneLoads * 16;
constexpr int kFillBlocks = 32;  // CTAs of kFillThreads: 512 KiB in flight, on few multiprocessors
constexpr int kFillThreads = 128;
constexpr int kWideBlocks = 256;  // CTAs where all multiprocessors are free to use
constexpr int kGatherThreads = 128;
constexpr int kMostGathered = 16;  // rows

struct OrderMemory {
  uint64_t sums[kThreads / kWarpThreads];
  int64_t total;
  int64_t passed;
};

__device__ void AddTo(int64_t* counter, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

__device__ int64_t Thread() { return static_cast<int64_t>(threadIdx.x); }
__device__ int64_t NumThreads() { return static_cast<int64_t>(blockDim.x); }

// Returns the number of things of all threads before this one, which has `count`. Sets memory.total
// to the sum over all threads.
__device__ int64_t PlaceOf(int64_t count, OrderMemory& memory) {
  const auto before = static_cast<int64_t>(SumBefore(static_cast<uint64_t>(count), memory.sums));
  if (Thread() == NumThreads() - 1) memory.total = before + count;
  __syncthreads();
  return before;
}

// ---- slots

// Puts up to `wanted` slots into `taken`: the first free ones.
__device__ int64_t TakeFree(const ResidencyState& s, int64_t wanted, OrderMemory& memory) {
  const int64_t most = min(wanted, s.counters->free_slots);
  int64_t count = 0;
  for (int64_t first = 0; count < most; first += NumThreads()) {
    const int64_t index = first + Thread();
    const uint32_t word = index < s.shape.num_free_words() ? s.free_bits[index] : 0;
    uint32_t rest = word;
    int64_t place = count + PlaceOf(__popc(word), memory);
    for (; rest != 0 && place < most; rest &= rest - 1, ++place) {
      const int bit = __ffs(static_cast<int>(rest)) - 1;
      s.taken[place] = static_cast<int32_t>(index * kWordBits + bit);
    }
    if (rest != word) s.free_bits[index] = rest;
    count = min(most, count + memory.total);
  }
  __syncthreads();
  if (Thread() == 0) s.counters->free_slots -= count;
  return count;
}

enum class Verdict { kStays, kLeaves, kStaysOnce };

__device__ Verdict Judge(const ResidencyState& s, int64_t slot, uint32_t spared) {
  if (s.slot_states[slot] != SlotState::kCached) return Verdict::kStays;
  const uint32_t touched = s.last_touched[s.slot_pages[slot]];
  if (touched == kNeverTouched) return Verdict::kLeaves;
  if (touched == spared) return Verdict::kStays;
  return touched <= s.slot_seen[slot] ? Verdict::kLeaves : Verdict::kStaysOnce;
}

__device__ void Evict(const ResidencyState& s, int64_t slot) {
  const int64_t page = s.slot_pages[slot];
  s.pages[page] = PageRef::OfAligned(s.shape.host_page(page), PageTier::kHost);
  s.slot_pages[slot] = -1;
  s.slot_states[slot] = SlotState::kFree;
}

// Appends victims among the next `most_examined` slots to the `count` slots already taken. Returns
// the new count.
__device__ int64_t TakeVictims(const ResidencyState& s, int64_t count, int64_t wanted,
                               uint32_t spared, int64_t most_examined, OrderMemory& memory) {
  const int64_t had = count;
  int64_t hand = s.counters->hand;
  for (int64_t examined = 0; examined < most_examined && count < wanted;) {
    const int64_t window = min(min(NumThreads(), most_examined - examined), s.shape.num_slots);
    const int64_t slot = (hand + Thread()) % s.shape.num_slots;
    const Verdict verdict = Thread() < window ? Judge(s, slot, spared) : Verdict::kStays;
    const bool leaves = verdict == Verdict::kLeaves;
    const int64_t place = count + PlaceOf(leaves ? 1 : 0, memory);
    if (Thread() == 0) memory.passed = window;
    __syncthreads();
    if (leaves && place == wanted - 1) memory.passed = Thread() + 1;
    __syncthreads();
    const int64_t passed = memory.passed;
    if (Thread() < passed && leaves) {
      Evict(s, slot);
      s.taken[place] = static_cast<int32_t>(slot);
    } else if (Thread() < passed && verdict == Verdict::kStaysOnce) {
      s.slot_seen[slot] = s.last_touched[s.slot_pages[slot]];
    }
    count = min(wanted, count + memory.total);
    hand = (hand + passed) % s.shape.num_slots;
    examined += passed;
    __syncthreads();
  }
  if (Thread() == 0) {
    s.counters->hand = hand;
    s.counters->evictions += count - had;
  }
  return count;
}

__device__ int64_t TakeSlots(const ResidencyState& s, int64_t wanted, uint32_t spared,
                             int64_t most_examined, OrderMemory& memory) {
  const int64_t free = TakeFree(s, wanted, memory);
  const int64_t taken = TakeVictims(s, free, wanted, spared, most_examined, memory);
  __syncthreads();
  return taken;
}

// Does not count the slot as free; the caller does.
__device__ void FreeSlot(const ResidencyState& s, int64_t slot) {
  s.slot_pages[slot] = -1;
  s.slot_states[slot] = SlotState::kFree;
  atomicOr(&s.free_bits[slot / kWordBits], 1u << (slot % kWordBits));
}

// ---- rows

__global__ void InitKernel(const __grid_constant__ ResidencyState s) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * NumThreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * NumThreads() + Thread();
  if (first == 0) *s.counters = {.free_slots = s.shape.num_slots};
  for (int64_t page = first; page < s.shape.num_pages(); page += stride) {
    s.pages[page] = PageRef();
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
  }
  for (int64_t slot = first; slot < s.shape.num_slots; slot += stride) {
    s.slot_pages[slot] = -1;
    s.slot_states[slot] = SlotState::kFree;
    s.slot_seen[slot] = 0;
  }
  for (int64_t word = first; word < s.shape.num_free_words(); word += stride) {
    const int64_t bits = min(kWordBits, s.shape.num_slots - word * kWordBits);
    s.free_bits[word] = bits == kWordBits ? 0xffffffff : (1u << bits) - 1;
  }
}

__global__ void OpenKernel(const __grid_constant__ ResidencyState s, const int32_t* rows,
                           int64_t num_rows) {
  __shared__ OrderMemory memory;
  const int64_t wanted = num_rows * s.shape.pages_per_row;
  const int64_t taken = TakeSlots(s, wanted, kNeverTouched, 2 * s.shape.num_slots, memory);
  for (int64_t i = Thread(); i < wanted; i += NumThreads()) {
    const int64_t page =
        rows[i / s.shape.pages_per_row] * s.shape.pages_per_row + i % s.shape.pages_per_row;
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
    if (i >= taken) continue;
    const int32_t slot = s.taken[i];
    s.pages[page] = PageRef::OfAligned(s.shape.slot_memory(slot), PageTier::kDevice);
    s.slot_pages[slot] = static_cast<int32_t>(page);
    s.slot_states[slot] = SlotState::kPinned;
    s.slot_seen[slot] = 0;
  }
  if (Thread() == 0) s.counters->without_room += wanted - taken;
}

__global__ void SealKernel(const __grid_constant__ ResidencyState s, const int32_t* rows) {
  const int64_t first = rows[blockIdx.x] * s.shape.pages_per_row;
  for (int64_t i = Thread(); i < s.shape.pages_per_row; i += NumThreads()) {
    const PageRef page = s.pages[first + i];
    if (page.tier() != PageTier::kDevice) continue;
    s.slot_states[s.shape.slot_of(page.page())] = SlotState::kCached;
  }
}

__global__ void RestoreKernel(const __grid_constant__ ResidencyState s, const int32_t* rows) {
  const int64_t first = rows[blockIdx.x] * s.shape.pages_per_row;
  for (int64_t page = first + Thread(); page < first + s.shape.pages_per_row;
       page += NumThreads()) {
    s.pages[page] = PageRef::OfAligned(s.shape.host_page(page), PageTier::kHost);
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
  }
}

__global__ void FreeKernel(const __grid_constant__ ResidencyState s, const int32_t* rows) {
  const int64_t row = rows[blockIdx.x];
  for (int64_t i = Thread(); i < s.shape.pages_per_row; i += NumThreads()) {
    PageRef& page = s.pages[row * s.shape.pages_per_row + i];
    if (page.tier() == PageTier::kDevice) {
      FreeSlot(s, s.shape.slot_of(page.page()));
      AddTo(&s.counters->free_slots, 1);
    }
    page = PageRef();
  }
  for (int64_t i = Thread(); i < s.counters->num_fills; i += NumThreads()) {
    if (s.fills[i].page / s.shape.pages_per_row == row) s.fills[i].given_up = 1;
  }
}

// ---- the end of a step

__global__ void MapKernel(const __grid_constant__ ResidencyState s) {
  __shared__ OrderMemory memory;
  const int64_t num_fills = s.counters->num_fills;
  int64_t given_up = 0;
  for (int64_t i = Thread(); i < num_fills; i += NumThreads()) {
    const PageFill fill = s.fills[i];
    if (fill.given_up != 0) {
      FreeSlot(s, fill.slot);
      ++given_up;
      continue;
    }
    s.pages[fill.page] = PageRef::OfAligned(s.shape.slot_memory(fill.slot), PageTier::kDevice);
    s.missed_bytes[fill.page] = 0;
    s.slot_pages[fill.slot] = fill.page;
    s.slot_states[fill.slot] = SlotState::kCached;
    s.slot_seen[fill.slot] = 0;
  }
  PlaceOf(given_up, memory);
  if (Thread() != 0) return;
  s.counters->given_up += memory.total;
  s.counters->free_slots += memory.total;
  s.counters->promotions += num_fills - memory.total;
  s.counters->num_fills = 0;
}

// One CTA a chunk.
__global__ void ScanKernel(const __grid_constant__ ResidencyState s, uint32_t step) {
  __shared__ int found;
  __shared__ int hits;
  __shared__ int misses;
  if (Thread() == 0) found = hits = misses = 0;
  __syncthreads();
  int own_found = 0;
  int own_hits = 0;
  int own_misses = 0;
  for (int64_t i = Thread(); i < kChunkPages; i += NumThreads()) {
    const int64_t page = static_cast<int64_t>(blockIdx.x) * kChunkPages + i;
    bool is_candidate = false;
    if (page < s.shape.num_pages()) {
      if (s.last_touched[page] == step) {
        ++(s.pages[page].tier() == PageTier::kDevice ? own_hits : own_misses);
      }
      const uint32_t missed = s.missed_bytes[page];
      is_candidate = missed > s.shape.page_bytes && s.pages[page].tier() == PageTier::kHost;
      if (missed != 0) s.missed_bytes[page] = missed - (missed >> kMissDecayShift);
    }
    const unsigned word = __ballot_sync(kAllLanes, is_candidate);
    if (i % kWarpThreads != 0) continue;
    s.candidate_bits[page / kWordBits] = word;
    own_found += __popc(word);
  }
  if (own_found != 0) atomicAdd(&found, own_found);
  if (own_hits != 0) atomicAdd(&hits, own_hits);
  if (own_misses != 0) atomicAdd(&misses, own_misses);
  __syncthreads();
  if (Thread() != 0) return;
  s.chunk_counts[blockIdx.x] = found;
  if (hits != 0) AddTo(&s.counters->hits, hits);
  if (misses != 0) AddTo(&s.counters->misses, misses);
}

// Lists the candidates of a chunk in places from `place` on. Called by one thread.
__device__ void ListChunk(const ResidencyState& s, int64_t chunk, int64_t place) {
  for (int64_t word = chunk * kChunkWords; word < (chunk + 1) * kChunkWords; ++word) {
    for (uint32_t bits = s.candidate_bits[word]; bits != 0; bits &= bits - 1, ++place) {
      if (place == s.shape.max_fills) return;
      const int bit = __ffs(static_cast<int>(bits)) - 1;
      s.candidates[place] = static_cast<int32_t>(word * kWordBits + bit);
    }
  }
}

__device__ int64_t ListCandidates(const ResidencyState& s, OrderMemory& memory) {
  const int64_t chunks = s.shape.num_chunks();
  const int64_t cursor = s.counters->cursor;
  int64_t count = 0;
  for (int64_t first = 0; first < chunks && count < s.shape.max_fills; first += NumThreads()) {
    const int64_t chunk = (cursor + first + Thread()) % chunks;
    const int64_t own = first + Thread() < chunks ? s.chunk_counts[chunk] : 0;
    const int64_t place = count + PlaceOf(own, memory);
    if (own != 0 && place < s.shape.max_fills) ListChunk(s, chunk, place);
    count = min(s.shape.max_fills, count + memory.total);
  }
  __syncthreads();
  return count;
}

__global__ void ChooseKernel(const __grid_constant__ ResidencyState s, uint32_t step) {
  __shared__ OrderMemory memory;
  const int64_t wanted = ListCandidates(s, memory);
  const int64_t taken = TakeSlots(s, wanted, step, s.shape.max_examined, memory);
  for (int64_t i = Thread(); i < taken; i += NumThreads()) {
    s.fills[i] = {.page = s.candidates[i], .slot = s.taken[i]};
    s.slot_states[s.taken[i]] = SlotState::kFilling;
  }
  if (Thread() != 0) return;
  s.counters->num_fills = taken;
  if (taken > 0 && (taken == s.shape.max_fills || taken < wanted)) {
    s.counters->cursor = (s.candidates[taken - 1] / kChunkPages + 1) % s.shape.num_chunks();
  }
}

// ---- copies

// Copies piece `piece` of a page, by one warp. All loads are in flight together.
__device__ void CopyPiece(const std::byte* from, std::byte* to, int64_t piece, int64_t page_bytes) {
  const int64_t begin = piece * kPieceBytes / 16 + Thread() % kWarpThreads;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  uint4 values[kLaneLoads];
#pragma unroll
  for (int i = 0; i < kLaneLoads; ++i) {
    const int64_t at = begin + i * kWarpThreads;
    if (at < page_bytes / 16) values[i] = source[at];
  }
#pragma unroll
  for (int i = 0; i < kLaneLoads; ++i) {
    const int64_t at = begin + i * kWarpThreads;
    if (at < page_bytes / 16) target[at] = values[i];
  }
}

__device__ int64_t NumPieces(const ResidencyState& s) {
  return (s.shape.page_bytes + kPieceBytes - 1) / kPieceBytes;
}

__device__ int64_t FirstUnit() {
  return (static_cast<int64_t>(blockIdx.x) * NumThreads() + Thread()) / kWarpThreads;
}
__device__ int64_t UnitStride() {
  return static_cast<int64_t>(gridDim.x) * NumThreads() / kWarpThreads;
}

__global__ void __launch_bounds__(kFillThreads)
    FillKernel(const __grid_constant__ ResidencyState s) {
  const int64_t pieces = NumPieces(s);
  for (int64_t unit = FirstUnit(); unit < s.counters->num_fills * pieces; unit += UnitStride()) {
    const PageFill& fill = s.fills[unit / pieces];
    CopyPiece(s.shape.host_page(fill.page), s.shape.slot_memory(fill.slot), unit % pieces,
              s.shape.page_bytes);
  }
}

struct GatheredRows {
  int32_t rows[kMostGathered];
};

// A page that is not in the device tier is read from its extent.
__global__ void GatherKernel(const __grid_constant__ ResidencyState s,
                             const __grid_constant__ GatheredRows from, int64_t num_rows,
                             std::byte* to) {
  const int64_t pieces = NumPieces(s);
  const int64_t units = num_rows * s.shape.pages_per_row * pieces;
  for (int64_t unit = FirstUnit(); unit < units; unit += UnitStride()) {
    const int64_t i = unit / pieces;
    const int64_t page =
        from.rows[i / s.shape.pages_per_row] * s.shape.pages_per_row + i % s.shape.pages_per_row;
    const bool is_here = s.pages[page].tier() == PageTier::kDevice;
    CopyPiece(is_here ? s.pages[page].page() : s.shape.host_page(page), to + i * s.shape.page_bytes,
              unit % pieces, s.shape.page_bytes);
  }
}

// One warp a row.
__global__ void CountKernel(const __grid_constant__ ResidencyState s, int32_t* counts) {
  for (int64_t row = FirstUnit(); row < s.shape.num_rows; row += UnitStride()) {
    const PageRef* const pages = s.pages + row * s.shape.pages_per_row;
    int count = 0;
    for (int64_t first = 0; first < s.shape.pages_per_row; first += kWarpThreads) {
      const int64_t i = first + Thread() % kWarpThreads;
      const bool in_device = i < s.shape.pages_per_row && pages[i].tier() == PageTier::kDevice;
      count += __popc(__ballot_sync(kAllLanes, in_device));
    }
    if (Thread() % kWarpThreads == 0) counts[row] = count;
  }
}

__global__ void BeginKernel(uint32_t step, uint32_t* step_number, const BlockRowChange* changes,
                            int64_t num_changes, int32_t* block_rows) {
  if (Thread() == 0) *step_number = step;
  for (int64_t i = Thread(); i < num_changes; i += NumThreads()) {
    block_rows[changes[i].entry] = changes[i].row;
  }
}

absl::Status Launched(absl::string_view op) { return CudaStatus(cudaGetLastError(), op); }

}  // namespace

absl::Status InitResidency(const ResidencyState& s, cudaStream_t stream) {
  InitKernel<<<kWideBlocks, kRowThreads, 0, stream>>>(s);
  return Launched("launching init_residency");
}

absl::Status OpenRows(const ResidencyState& s, std::span<const int32_t> rows, cudaStream_t stream) {
  if (rows.empty()) return absl::OkStatus();
  OpenKernel<<<1, kThreads, 0, stream>>>(s, rows.data(), std::ssize(rows));
  return Launched("launching open_rows");
}

absl::Status CopyRowsToHost(const ResidencyState& s, std::span<const int32_t> rows,
                            std::span<std::byte> gathered, cudaStream_t stream) {
  const int64_t row_bytes = s.shape.pages_per_row * s.shape.page_bytes;
  const auto most =
      static_cast<size_t>(std::min<int64_t>(kMostGathered, std::ssize(gathered) / row_bytes));
  KVASIR_CHECK(most > 0 || rows.empty());
  for (; !rows.empty(); rows = rows.subspan(std::min(most, rows.size()))) {
    const std::span<const int32_t> some = rows.first(std::min(most, rows.size()));
    GatheredRows from = {};
    std::copy(some.begin(), some.end(), from.rows);
    GatherKernel<<<kWideBlocks, kGatherThreads, 0, stream>>>(s, from, std::ssize(some),
                                                             gathered.data());
    KVASIR_RETURN_IF_ERROR(Launched("launching copy_rows_to_host"));
    for (size_t i = 0; i < some.size(); ++i) {
      KVASIR_RETURN_IF_ERROR(CudaStatus(
          cudaMemcpyAsync(s.shape.host_page(some[i] * s.shape.pages_per_row),
                          gathered.data() + static_cast<int64_t>(i) * row_bytes,
                          static_cast<size_t>(row_bytes), cudaMemcpyDeviceToHost, stream),
          "copying rows to the host"));
    }
  }
  return absl::OkStatus();
}

absl::Status SealRows(const ResidencyState& s, std::span<const int32_t> rows, cudaStream_t stream) {
  if (rows.empty()) return absl::OkStatus();
  SealKernel<<<static_cast<unsigned>(rows.size()), kRowThreads, 0, stream>>>(s, rows.data());
  return Launched("launching seal_rows");
}

absl::Status RestoreRows(const ResidencyState& s, std::span<const int32_t> rows,
                         cudaStream_t stream) {
  if (rows.empty()) return absl::OkStatus();
  RestoreKernel<<<static_cast<unsigned>(rows.size()), kRowThreads, 0, stream>>>(s, rows.data());
  return Launched("launching restore_rows");
}

absl::Status FreeRows(const ResidencyState& s, std::span<const int32_t> rows, cudaStream_t stream) {
  if (rows.empty()) return absl::OkStatus();
  FreeKernel<<<static_cast<unsigned>(rows.size()), kRowThreads, 0, stream>>>(s, rows.data());
  return Launched("launching free_rows");
}

absl::Status MapFills(const ResidencyState& s, cudaStream_t stream) {
  MapKernel<<<1, kThreads, 0, stream>>>(s);
  return Launched("launching map_fills");
}

absl::Status PlanFills(const ResidencyState& s, uint32_t step, cudaStream_t stream) {
  const auto chunks = static_cast<unsigned>(s.shape.num_chunks());
  ScanKernel<<<chunks, kScanThreads, 0, stream>>>(s, step);
  KVASIR_RETURN_IF_ERROR(Launched("launching the scan of plan_fills"));
  ChooseKernel<<<1, kThreads, 0, stream>>>(s, step);
  return Launched("launching plan_fills");
}

absl::Status CopyFills(const ResidencyState& s, cudaStream_t stream) {
  // A multiprocessor divides its memory into cache and shared memory only while it is idle. Use the
  // division that a step's other kernels want. Otherwise they would wait until the copies end.
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(FillKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 "preparing copy_fills"));
  FillKernel<<<kFillBlocks, kFillThreads, 0, stream>>>(s);
  return Launched("launching copy_fills");
}

absl::Status CountDevicePages(const ResidencyState& s, std::span<int32_t> counts,
                              cudaStream_t stream) {
  CountKernel<<<kWideBlocks, kGatherThreads, 0, stream>>>(s, counts.data());
  return Launched("launching count_device_pages");
}

absl::Status BeginResidencyStep(uint32_t step, uint32_t* step_number,
                                std::span<const BlockRowChange> changes, int32_t* block_rows,
                                cudaStream_t stream) {
  BeginKernel<<<1, kThreads, 0, stream>>>(step, step_number, changes.data(), std::ssize(changes),
                                          block_rows);
  return Launched("launching begin_residency_step");
}

}  // namespace kvasir::kernels
