// Finding is spread over the GPU. What must follow an order (slots, the request) is done by the CTA
// that ends last, whose warps then take tickets in turn.
#include <algorithm>

#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/row_items.h"
#include "kernels/residency/bring_pages_cuda.h"
#include "kernels/residency/page_pieces.cuh"
#include "kernels/residency/residency_slots.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kBringThreads = 256;
constexpr int kWarps = kBringThreads / kWarpThreads;
constexpr int64_t kRowParts = 16;  // of a row's items, a warp each
constexpr int64_t kMostBlocks = 128;
constexpr uint32_t kLooksBetweenClocks = 256;

struct BringLaunch {
  ResidencyState state;
  MailboxView mailbox;
  PagedKv kv;
  int64_t layer = 0;
  const QueryTile* tiles = nullptr;
  PageSelection selection;
  uint64_t patience_ns = 0;
};

__device__ uint64_t LoadFromHost(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ void StoreToHost(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ void StoreToHost(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Lists the page if it is absent and not listed yet, and spares it if it is here.
__device__ void NeedPage(const BringLaunch& p, uint32_t call, int32_t slot, int64_t page) {
  const ResidencyState& s = p.state;
  uint32_t* const needed_in = s.needed_in + (page - s.shape.first_lean_page());
  if (s.pages[page].tier() != PageTier::kAbsent) {
    *needed_in = call;
  } else if (atomicExch(needed_in, call) != call) {
    s.absent[atomicAdd(&s.bring->num_absent, 1)] = {.page = static_cast<int32_t>(page),
                                                    .slot = slot};
  }
}

// By one warp.
__device__ void FindInRow(const BringLaunch& p, uint32_t call, int64_t row, int64_t part) {
  const int64_t heads = p.kv.layout.num_kv_heads;
  const QueryTile tile = p.tiles[row / heads];
  const SelectionHeader header = p.selection.headers[row];
  const SelectionEntry* const list = p.selection.entries + row * p.selection.capacity;
  const RowItems items = NumberItems(header, tile.first_position + tile.num_rows - 1);
  const int64_t first = part * kWarpThreads + Thread() % kWarpThreads;
  for (int64_t i = first; i < items.num_items; i += kRowParts * kWarpThreads) {
    const RowItem item = FindItem(items, header, list, i);
    if (item.mask == 0 || p.kv.extent(tile.slot, item.page) < p.state.shape.num_extents) continue;
    NeedPage(p, call, static_cast<int32_t>(tile.slot),
             p.kv.PageIndex(tile.slot, item.page, p.layer, row % heads));
  }
}

// Returns to all threads of a CTA whether the others have ended.
__device__ bool IsLast(BringState& bring) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (Thread() == 0) is_last = atomicAdd(&bring.ended_blocks, 1) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return is_last;
}

// Waits for the ticket, by all lanes of a warp, so that each may read the page. Returns whether the
// page came. `gave_up` is that of all warps.
__device__ bool AwaitTicket(const BringLaunch& p, uint64_t ticket, volatile bool& gave_up) {
  const uint64_t* const arrived = &p.mailbox.flags->arrived[ticket % kMailboxBuffers];
  uint64_t begin_ns = 0;
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t found = LoadFromHost(arrived);
    const bool is_here = found / 2 == ticket + 1;
    if (__all_sync(kAllLanes, is_here)) return found % 2 == 1;
    if (looks % kLooksBetweenClocks != 0) continue;
    const uint64_t now = __shfl_sync(kAllLanes, hopper::NowNs(), 0);
    if (begin_ns == 0) begin_ns = now;
    if (now - begin_ns > p.patience_ns) gave_up = true;
    if (__any_sync(kAllLanes, gave_up)) return false;
  }
}

__device__ void TakePage(const BringLaunch& p, int64_t i, uint64_t ticket, volatile bool& gave_up) {
  const ResidencyState& s = p.state;
  const int64_t page = s.absent[i].page;
  const int64_t slot = s.taken[i];
  const bool came = AwaitTicket(p, ticket, gave_up);
  const std::byte* const buffer =
      p.mailbox.buffers + static_cast<int64_t>(ticket % kMailboxBuffers) * s.shape.page_bytes;
  for (int64_t piece = 0; came && piece < NumPieces(s); ++piece) {
    CopyPiece(buffer, s.shape.slot_memory(slot), piece, s.shape.page_bytes);
  }
  __syncwarp();
  if (Thread() % kWarpThreads != 0) return;
  StoreToHost(&p.mailbox.flags->taken[ticket % kMailboxBuffers], ticket + 1);
  if (!came) {
    FreeSlot(s, slot);
    AddTo(&s.counters->free_slots, 1);
    return;
  }
  s.last_touched[page] = kNeverTouched;
  EnterSlot(s, page, slot, SlotState::kCached);
  AddTo(&s.counters->promotions, 1);
}

// Pages for which there is no slot stay absent.
__device__ void BringListed(const BringLaunch& p, uint32_t call, int64_t wanted,
                            OrderMemory& memory) {
  const ResidencyState& s = p.state;
  const int64_t num_pages = TakeSlots(s, wanted, {.call = call}, 2 * s.shape.num_slots, memory);
  if (num_pages == 0) return;
  __shared__ bool gave_up;
  const uint64_t first_ticket = s.bring->tickets;
  MailboxFlags& flags = *p.mailbox.flags;
  if (Thread() == 0) {
    gave_up = false;
    StoreToHost(&flags.begun, s.bring->requests + 1);
    __threadfence_system();
  }
  __syncthreads();
  for (int64_t i = Thread(); i < num_pages; i += NumThreads()) p.mailbox.asked[i] = s.absent[i];
  __threadfence_system();
  __syncthreads();
  if (Thread() == 0) {
    flags.num_pages = static_cast<int32_t>(num_pages);
    flags.layer = static_cast<int32_t>(p.layer);
    flags.first_ticket = first_ticket;
    StoreToHost(&flags.request, ++s.bring->requests);
    s.bring->tickets = first_ticket + static_cast<uint64_t>(num_pages);
  }
  for (int64_t i = Thread() / kWarpThreads; i < num_pages; i += kWarps) {
    TakePage(p, i, first_ticket + static_cast<uint64_t>(i), gave_up);
  }
}

__global__ void __launch_bounds__(kBringThreads)
    BringKernel(const __grid_constant__ BringLaunch p) {
  __shared__ OrderMemory memory;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  BringState& bring = *p.state.bring;
  const uint32_t call = bring.calls + 1;
  for (int64_t unit = FirstUnit(); unit < p.selection.num_rows * kRowParts; unit += UnitStride()) {
    FindInRow(p, call, unit / kRowParts, unit % kRowParts);
  }
  if (!IsLast(bring)) return;
  const int64_t wanted = *const_cast<volatile int32_t*>(&bring.num_absent);
  if (wanted > 0) BringListed(p, call, wanted, memory);
  __syncthreads();
  if (Thread() != 0) return;
  bring.num_absent = 0;
  bring.ended_blocks = 0;
  bring.calls = call == 0xffffffff - 1 ? 0 : call;
}

}  // namespace

absl::Status BringPages(const ResidencyState& state, const MailboxView& mailbox,
                        const BringParams& params, cudaStream_t stream) {
  const int64_t rows = params.selection.num_rows;
  ShapeCheck check("bring_pages");
  check
      .Require(rows == std::ssize(params.tiles) * params.kv.layout.num_kv_heads,
               "rows must be tiles x heads")
      .Require(state.bring != nullptr, "the state must have lean blocks")
      .Require(params.kv.pages == state.pages, "tables must be those of the state");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (rows == 0) return absl::OkStatus();
  const BringLaunch launch = {.state = state,
                              .mailbox = mailbox,
                              .kv = params.kv,
                              .layer = params.layer,
                              .tiles = params.tiles.data(),
                              .selection = params.selection,
                              .patience_ns = params.patience_ns};
  const int64_t blocks = std::min(kMostBlocks, (rows * kRowParts + kWarps - 1) / kWarps);
  return CudaStatus(LaunchOverlapped(BringKernel, static_cast<unsigned>(blocks), kBringThreads, 0,
                                     stream, launch),
                    "launching bring_pages");
}

}  // namespace kvasir::kernels
