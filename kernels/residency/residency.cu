// The residency protocol on the GPU, but for the copies (residency_copies.cu). Work that must
// follow an order (which slots are taken, where CLOCK's hand stops) is done by one CTA, so the
// state equals that of residency_cpu.cc, whatever the timing.
#include "kernels/base/status_macros.h"
#include "kernels/base/warp.cuh"
#include "kernels/residency/residency_cuda.h"
#include "kernels/residency/residency_launch.cuh"
#include "kernels/residency/residency_slots.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kExtentThreads = 256;
constexpr int kScanThreads = 256;
constexpr int kSurveyThreads = 128;

// ---- extents

__global__ void InitKernel(const __grid_constant__ ResidencyState s) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * NumThreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * NumThreads() + Thread();
  if (first == 0) *s.counters = {.free_slots = s.shape.num_slots};
  if (first == 0 && s.bring != nullptr) *s.bring = {};
  for (int64_t i = first; i < s.shape.num_pages() - s.shape.first_lean_page(); i += stride) {
    s.needed_in[i] = 0;
  }
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

__global__ void OpenKernel(const __grid_constant__ ResidencyState s, const int32_t* extents,
                           int64_t num_extents) {
  __shared__ OrderMemory memory;
  const int64_t wanted = num_extents * s.shape.pages_per_extent;
  const int64_t taken = TakeSlots(s, wanted, Spared(), 2 * s.shape.num_slots, memory);
  for (int64_t i = Thread(); i < wanted; i += NumThreads()) {
    const int64_t page = extents[i / s.shape.pages_per_extent] * s.shape.pages_per_extent +
                         i % s.shape.pages_per_extent;
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
    if (i >= taken) continue;
    const int32_t slot = s.taken[i];
    EnterSlot(s, page, slot, SlotState::kPinned);
  }
  if (Thread() == 0) s.counters->without_room += wanted - taken;
}

__global__ void SealKernel(const __grid_constant__ ResidencyState s, const int32_t* extents) {
  const int64_t first = extents[blockIdx.x] * s.shape.pages_per_extent;
  for (int64_t i = Thread(); i < s.shape.pages_per_extent; i += NumThreads()) {
    const PageRef page = s.pages[first + i];
    if (page.tier() != PageTier::kDevice) continue;
    s.slot_states[s.shape.slot_of(page.page())] = SlotState::kCached;
  }
}

__global__ void RestoreKernel(const __grid_constant__ ResidencyState s, const int32_t* extents) {
  const int64_t first = extents[blockIdx.x] * s.shape.pages_per_extent;
  for (int64_t page = first + Thread(); page < first + s.shape.pages_per_extent;
       page += NumThreads()) {
    s.pages[page] = s.shape.home(page);
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
  }
}

__global__ void FreeKernel(const __grid_constant__ ResidencyState s, const int32_t* extents) {
  const int64_t extent = extents[blockIdx.x];
  for (int64_t i = Thread(); i < s.shape.pages_per_extent; i += NumThreads()) {
    PageRef& page = s.pages[extent * s.shape.pages_per_extent + i];
    if (page.tier() == PageTier::kDevice) {
      FreeSlot(s, s.shape.slot_of(page.page()));
      AddTo(&s.counters->free_slots, 1);
    }
    page = PageRef();
  }
  for (int64_t i = Thread(); i < s.counters->num_fills; i += NumThreads()) {
    if (s.fills[i].page / s.shape.pages_per_extent == extent) s.fills[i].given_up = 1;
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
    EnterSlot(s, fill.page, fill.slot, SlotState::kCached);
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
      is_candidate = missed >= s.shape.page_bytes && s.pages[page].tier() == PageTier::kHost;
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

// Enters the first candidates and the slots taken for them.
__device__ void EnterFills(const ResidencyState& s, int64_t count) {
  for (int64_t i = Thread(); i < count; i += NumThreads()) {
    s.fills[i] = {.page = s.candidates[i], .slot = s.taken[i]};
    s.slot_states[s.taken[i]] = SlotState::kFilling;
  }
  if (Thread() == 0) s.counters->num_fills = count;
}

__global__ void ChooseKernel(const __grid_constant__ ResidencyState s, uint32_t step) {
  __shared__ OrderMemory memory;
  const int64_t wanted = ListCandidates(s, memory);
  const int64_t taken = TakeSlots(s, wanted, {.step = step}, s.shape.max_examined, memory);
  EnterFills(s, taken);
  if (Thread() != 0) return;
  if (taken > 0 && (taken == s.shape.max_fills || taken < wanted)) {
    s.counters->cursor = (s.candidates[taken - 1] / kChunkPages + 1) % s.shape.num_chunks();
  }
}

// One CTA: the pages' order is that of the extents.
__global__ void PromotionKernel(const __grid_constant__ ResidencyState s, const int32_t* extents,
                                int64_t num_extents, const uint8_t* running, uint32_t step) {
  __shared__ OrderMemory memory;
  const int64_t pages = num_extents * s.shape.pages_per_extent;
  int64_t wanted = 0;
  for (int64_t first = 0; first < pages; first += NumThreads()) {
    const int64_t i = first + Thread();
    int64_t page = 0;
    bool is_wanted = false;
    if (i < pages) {
      page = extents[i / s.shape.pages_per_extent] * s.shape.pages_per_extent +
             i % s.shape.pages_per_extent;
      s.last_touched[page] = step - 1;
      is_wanted = s.pages[page].tier() == PageTier::kHost;
    }
    const int64_t place = wanted + PlaceOf(is_wanted ? 1 : 0, memory);
    if (is_wanted && place < s.shape.num_slots) s.candidates[place] = static_cast<int32_t>(page);
    wanted = min(s.shape.num_slots, wanted + memory.total);
  }
  __syncthreads();
  const Spared spared = {.step = FirstRecentStep(step), .running = running};
  EnterFills(s, TakeSlots(s, wanted, spared, 2 * s.shape.num_slots, memory));
}

// One warp an extent.
__global__ void SurveyKernel(const __grid_constant__ ResidencyState s, ExtentUse* uses) {
  for (int64_t extent = FirstUnit(); extent < s.shape.num_blocks(); extent += UnitStride()) {
    const int64_t first = extent * s.shape.pages_per_extent;
    unsigned pages = 0;
    uint32_t last = 0;
    for (int64_t i = Thread() % kWarpThreads; i < s.shape.pages_per_extent; i += kWarpThreads) {
      pages += s.pages[first + i].tier() == PageTier::kDevice ? 1 : 0;
      const uint32_t touched = s.last_touched[first + i];
      if (touched != kNeverTouched) last = max(last, touched);
    }
    const auto device_pages = static_cast<int32_t>(__reduce_add_sync(kAllLanes, pages));
    const uint32_t last_read = __reduce_max_sync(kAllLanes, last);
    if (Thread() % kWarpThreads == 0) {
      uses[extent] = {.device_pages = device_pages, .last_read = last_read};
    }
  }
}

__global__ void BeginKernel(uint32_t step, uint32_t* step_number, const BlockExtentChange* changes,
                            int64_t num_changes, int32_t* block_extents) {
  if (Thread() == 0) *step_number = step;
  for (int64_t i = Thread(); i < num_changes; i += NumThreads()) {
    block_extents[changes[i].entry] = changes[i].extent;
  }
}

}  // namespace

absl::Status InitResidency(const ResidencyState& s, cudaStream_t stream) {
  InitKernel<<<kWideBlocks, kExtentThreads, 0, stream>>>(s);
  return Launched("launching init_residency");
}

absl::Status OpenExtents(const ResidencyState& s, std::span<const int32_t> extents,
                         cudaStream_t stream) {
  if (extents.empty()) return absl::OkStatus();
  OpenKernel<<<1, kOrderThreads, 0, stream>>>(s, extents.data(), std::ssize(extents));
  return Launched("launching open_extents");
}

absl::Status SealExtents(const ResidencyState& s, std::span<const int32_t> extents,
                         cudaStream_t stream) {
  if (extents.empty()) return absl::OkStatus();
  SealKernel<<<static_cast<unsigned>(extents.size()), kExtentThreads, 0, stream>>>(s,
                                                                                   extents.data());
  return Launched("launching seal_extents");
}

absl::Status RestoreExtents(const ResidencyState& s, std::span<const int32_t> extents,
                            cudaStream_t stream) {
  if (extents.empty()) return absl::OkStatus();
  RestoreKernel<<<static_cast<unsigned>(extents.size()), kExtentThreads, 0, stream>>>(
      s, extents.data());
  return Launched("launching restore_extents");
}

absl::Status FreeExtents(const ResidencyState& s, std::span<const int32_t> extents,
                         cudaStream_t stream) {
  if (extents.empty()) return absl::OkStatus();
  FreeKernel<<<static_cast<unsigned>(extents.size()), kExtentThreads, 0, stream>>>(s,
                                                                                   extents.data());
  return Launched("launching free_extents");
}

absl::Status MapFills(const ResidencyState& s, cudaStream_t stream) {
  MapKernel<<<1, kOrderThreads, 0, stream>>>(s);
  return Launched("launching map_fills");
}

absl::Status PlanFills(const ResidencyState& s, uint32_t step, cudaStream_t stream) {
  const auto chunks = static_cast<unsigned>(s.shape.num_chunks());
  ScanKernel<<<chunks, kScanThreads, 0, stream>>>(s, step);
  KVASIR_RETURN_IF_ERROR(Launched("launching the scan of plan_fills"));
  ChooseKernel<<<1, kOrderThreads, 0, stream>>>(s, step);
  return Launched("launching plan_fills");
}

absl::Status PlanPromotion(const ResidencyState& s, std::span<const int32_t> extents,
                           std::span<const uint8_t> running, uint32_t step, cudaStream_t stream) {
  if (extents.empty()) return absl::OkStatus();
  PromotionKernel<<<1, kOrderThreads, 0, stream>>>(s, extents.data(), std::ssize(extents),
                                                   running.data(), step);
  return Launched("launching plan_promotion");
}

absl::Status SurveyExtents(const ResidencyState& s, std::span<ExtentUse> uses,
                           cudaStream_t stream) {
  SurveyKernel<<<kWideBlocks, kSurveyThreads, 0, stream>>>(s, uses.data());
  return Launched("launching survey_extents");
}

absl::Status BeginResidencyStep(uint32_t step, uint32_t* step_number,
                                std::span<const BlockExtentChange> changes, int32_t* block_extents,
                                cudaStream_t stream) {
  BeginKernel<<<1, kOrderThreads, 0, stream>>>(step, step_number, changes.data(),
                                               std::ssize(changes), block_extents);
  return Launched("launching begin_residency_step");
}

}  // namespace kvasir::kernels
