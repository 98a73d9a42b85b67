// Brings pages of lean blocks (residency.h) into the device tier within a step, between selection
// and attention: a fault mailbox. A kernel finds the absent pages that the selections of a layer
// name, gives them slots, lists them in pinned memory and rings a bell. A thread of the host, which
// never calls the driver, copies each page into a buffer of the mailbox and says so; the kernel
// copies it on to its slot and enters it in the page table. So the launches of a step stay the same
// ones, whatever is absent, and a layer that needs nothing pays one kernel that looks.
//
//   device   request 7: pages p q r ──▶ bell           wait for ticket t: buffer t % n ──▶ slot
//   host                 look at the bell ──▶ p from the page cache ──▶ buffer, arrived = t
//
// A page that does not come stays absent: attention sets the fault of its sequence, and the row is
// invalid, as with any absent page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/residency/residency.h"

namespace kvasir::kernels {

// Pages on their way through the mailbox at a time.
inline constexpr int64_t kMailboxBuffers = 128;

// The part of the mailbox that is a list and flags. All in pinned memory at one address on both
// sides. Each page of each request has a ticket, counted from 0; ticket t uses buffer t %
// kMailboxBuffers.
struct MailboxFlags {
  // Written by the device, `begun` before the list of a request and `request` after it: the number
  // of requests so far. A list that was read while both had one value is whole. A new request means
  // that the device waits for none before it.
  uint32_t begun;
  uint32_t request;
  int32_t num_pages;
  int32_t layer;
  uint64_t first_ticket;
  // By buffer, written by the host: 2 (t + 1) when the page of ticket t cannot be read, 1 more when
  // it lies in the buffer.
  uint64_t arrived[kMailboxBuffers];
  // By buffer, written by the device: t + 1 when it has no more use for the page of ticket t.
  uint64_t taken[kMailboxBuffers];
};

struct MailboxView {
  MailboxFlags* flags = nullptr;
  AskedPage* asked = nullptr;    // [pages of lean blocks]
  std::byte* buffers = nullptr;  // [kMailboxBuffers] pages
};

struct BringParams {
  const PagedKv& kv;  // whose tables are those of the state
  int64_t layer = 0;
  std::span<const QueryTile> tiles;  // device memory
  const PageSelection& selection;    // rows are tiles x KV heads; device memory
  uint64_t patience_ns = 10'000'000'000;
};

// Brings the pages that the selections name. Waits in the device until one does not come for
// `patience_ns`; then the others that are not here yet stay absent too. REQUIRES: slots that are
// not pinned or being filled are at least as many as the distinct pages named.
absl::Status BringPages(const ResidencyState& state, const MailboxView& mailbox,
                        const BringParams& params, cudaStream_t stream);

}  // namespace kvasir::kernels
