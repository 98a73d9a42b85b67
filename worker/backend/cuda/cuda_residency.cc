#include "worker/backend/cuda/cuda_residency.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/append/key_codes_cuda.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"

namespace kvasir::worker {

using kernels::CudaStatus;
using kernels::DeviceBuffer;
using kernels::ResidencyCounters;
using kernels::ResidencyShape;
using kernels::ResidencyState;

namespace {

// Bytes copied beside one step: 4.9 ms on a link of 55 GB/s, about as long as a decode step of an
// 8B model. An unfinished fill delays the next step.
constexpr int64_t kFilledBytesPerStep = int64_t{256} << 20;
constexpr int64_t kSmallestFilledPart = 8;  // at most this part of the device tier per step
constexpr int64_t kExaminedPerFill = 16;
// Bytes gathered before they are copied to the host, at least one extent.
constexpr int64_t kGatheredBytes = int64_t{64} << 20;

ResidencyShape ShapeOf(const kvstore::ResidencyOptions& options) {
  const kernels::KvLayout& layout = options.format.shard().layout;
  const int64_t fills = std::max<int64_t>(1, std::min(kFilledBytesPerStep / layout.page_bytes(),
                                                      options.device_pages / kSmallestFilledPart));
  return {.num_extents = options.num_extents,
          .pages_per_extent = layout.pages_per_block(),
          .num_slots = options.device_pages,
          .page_bytes = layout.page_bytes(),
          .extent_stride = options.format.extent_bytes(),
          .num_lean = std::ssize(options.lean_bounds),
          .max_fills = fills,
          .max_examined = kExaminedPerFill * fills};
}

absl::Status UploadWhole(const DeviceBuffer& to, const void* from, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(stream.CopyToDevice(to.data(), from, to.size_bytes()));
  return stream.Wait();
}

// Returns [num_extents] addresses of equal pieces of a buffer.
absl::StatusOr<DeviceBuffer> MakeAddresses(const DeviceBuffer& of, int64_t num_extents,
                                           const CudaStream& stream) {
  std::vector<std::byte*> addresses;
  for (int64_t extent = 0; extent < num_extents; ++extent) {
    addresses.push_back(of.data() + extent * (of.size_bytes() / num_extents));
  }
  KVASIR_ASSIGN_OR_RETURN(
      DeviceBuffer table,
      DeviceBuffer::Allocate(num_extents * static_cast<int64_t>(sizeof(std::byte*))));
  KVASIR_RETURN_IF_ERROR(UploadWhole(table, addresses.data(), stream));
  return table;
}

// Beside reserved_pages(), two open blocks and the fills of a step must have room.
absl::Status CheckRoomForLayer(const ResidencyShape& shape, const kernels::KvLayout& layout) {
  if (shape.num_lean == 0) return absl::OkStatus();
  const int64_t without_fills = shape.num_lean * layout.num_kv_heads + 2 * shape.pages_per_extent;
  if (shape.num_slots >= without_fills + shape.max_fills) return absl::OkStatus();
  // Fills take their part of what is added too, up to their most.
  const int64_t needed =
      std::min(without_fills + kFilledBytesPerStep / shape.page_bytes,
               without_fills * kSmallestFilledPart / (kSmallestFilledPart - 1) + 1);
  return absl::ResourceExhaustedError(absl::StrCat(
      "the device tier has ", shape.num_slots, " pages, and with KV on demand needs ", needed,
      ": one layer of all ", shape.num_lean, " blocks that may lie on disk only; raise ",
      "--kv-device-size-gb by ", (needed - shape.num_slots) * shape.page_bytes / 1'000'000 + 1,
      " MB, or lower --kv-on-demand-size-gb"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaResidency>> CudaResidency::Make(
    const kvstore::ResidencyOptions& options, const CudaStream& stream) {
  KVASIR_RETURN_IF_ERROR(CheckResidencyShape(ShapeOf(options)));
  KVASIR_RETURN_IF_ERROR(CheckRoomForLayer(ShapeOf(options), options.format.shard().layout));
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PinnedRegion> extents,
                          PinnedRegion::Over(options.memory, options.format.extent_bytes(),
                                             options.num_extents, "--kv-host-size-gb"));
  std::unique_ptr<CudaResidency> residency(new CudaResidency(options, stream, std::move(extents)));
  KVASIR_RETURN_IF_ERROR(residency->TakeMemory(options));
  KVASIR_RETURN_IF_ERROR(residency->MakeTables());
  KVASIR_RETURN_IF_ERROR(residency->extents_->Start());  // last, as others wait for the driver then
  return residency;
}

CudaResidency::CudaResidency(const kvstore::ResidencyOptions& options, const CudaStream& stream,
                             std::unique_ptr<PinnedRegion> extents)
    : format_(options.format),
      layout_(format_.shard().layout),
      num_slots_(options.num_slots),
      max_blocks_per_slot_(options.max_blocks_per_slot),
      stream_(stream),
      extents_(std::move(extents)),
      host_(options.format, options.num_extents, options.freed_memory, extents_->data()),
      checksums_(options.format, host_),
      lean_bounds_(options.lean_bounds),
      extent_states_(static_cast<size_t>(options.num_extents) + lean_bounds_.size(),
                     ExtentState::kNone),
      copies_(extent_states_.size()),
      bindings_(extent_states_.size()),
      block_extents_(static_cast<size_t>(num_slots_ * max_blocks_per_slot_), -1),
      is_rebound_(block_extents_.size()) {
  state_.shape = ShapeOf(options);
  state_.shape.extents = extents_->data() + options.format.pages_offset();
  seen_.free_slots = state_.shape.num_slots;
}

absl::Status CudaResidency::TakeMemory(const kvstore::ResidencyOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(fill_stream_, CudaStream::Create());
  KVASIR_ASSIGN_OR_RETURN(copy_stream_, CudaStream::Create());
  for (CudaEvent* event : {&planned_, &filled_, &written_, &copied_, &counted_[0], &counted_[1]}) {
    KVASIR_ASSIGN_OR_RETURN(*event, CudaEvent::Create());
  }
  KVASIR_ASSIGN_OR_RETURN(upload_, CommandUpload::Create());
  const auto take = [](int64_t bytes, DeviceBuffer& buffer) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(buffer, DeviceBuffer::Allocate(bytes));
    return absl::OkStatus();
  };
  const int64_t extents = std::ssize(extent_states_);
  KVASIR_RETURN_IF_ERROR(take(std::max(kGatheredBytes, layout_.block_bytes()), gathered_));
  KVASIR_RETURN_IF_ERROR(take(options.device_pages * layout_.page_bytes(), arena_));
  KVASIR_RETURN_IF_ERROR(take(extents * layout_.block_bounds_bytes(), bounds_));
  if (options.key_codes) {
    KVASIR_RETURN_IF_ERROR(take(extents * layout_.block_key_codes_bytes(), key_codes_));
  }
  state_.shape.arena = arena_.data();
  KVASIR_RETURN_IF_ERROR(take(LayOutResidency(state_.shape, nullptr).bytes, state_memory_));
  state_ = LayOutResidency(state_.shape, state_memory_.data());
  KVASIR_RETURN_IF_ERROR(
      take(static_cast<int64_t>(block_extents_.size() * sizeof(int32_t)), block_extents_table_));
  KVASIR_RETURN_IF_ERROR(take(sizeof(uint32_t), step_number_));
  KVASIR_ASSIGN_OR_RETURN(counters_,
                          kernels::PinnedBuffer::Allocate(2 * sizeof(ResidencyCounters)));
  std::fill_n(counters_.As<ResidencyCounters>(), 2, seen_);
  if (lean_bounds_.empty()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(
      mailbox_, PageMailbox::Create(layout_.page_bytes(),
                                    state_.shape.num_pages() - state_.shape.first_lean_page()));
  return absl::OkStatus();
}

absl::Status CudaResidency::MakeTables() {
  KVASIR_ASSIGN_OR_RETURN(bounds_table_,
                          MakeAddresses(bounds_, std::ssize(extent_states_), stream_));
  if (key_codes_.size_bytes() > 0) {
    KVASIR_ASSIGN_OR_RETURN(key_codes_table_,
                            MakeAddresses(key_codes_, std::ssize(extent_states_), stream_));
  }
  KVASIR_RETURN_IF_ERROR(UploadWhole(block_extents_table_, block_extents_.data(), stream_));
  return InitResidency(state_, stream_.get());
}

CudaResidency::~CudaResidency() {
  // Whoever met an error first has reported it.
  fill_stream_.Wait().IgnoreError();
  copy_stream_.Wait().IgnoreError();
  stream_.Wait().IgnoreError();
}

KvArenas CudaResidency::arenas() const {
  return {.device = {.base = arena_.data(), .bytes = arena_.size_bytes()},
          .host = {.base = extents_->data(), .bytes = extents_->size_bytes()}};
}

// ---- extents: the host's books, and the commands to the device

absl::Status CudaResidency::Open(int64_t extent) {
  KVASIR_CHECK(state_of(extent) == ExtentState::kNone);
  state_of(extent) = ExtentState::kOpening;
  ++open_extents_;
  commands_.opened.push_back(static_cast<int32_t>(extent));
  return absl::OkStatus();
}

absl::Status CudaResidency::Seal(int64_t extent, const kvstore::PrefixHash& hash) {
  if (state_of(extent) == ExtentState::kOpening) KVASIR_RETURN_IF_ERROR(CarryOut(step_));
  KVASIR_CHECK(state_of(extent) == ExtentState::kOpen);
  state_of(extent) = ExtentState::kSealed;
  --open_extents_;
  ++sealed_blocks_;
  commands_.copied.push_back(static_cast<int32_t>(extent));
  copies_[static_cast<size_t>(extent)] = {.hash = hash, .number = begun_copies_ + 1};
  unsummed_.push_back(static_cast<int32_t>(extent));
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaResidency::IsExtentWhole(int64_t extent) {
  KVASIR_CHECK(state_of(extent) == ExtentState::kSealed);
  ExtentCopy& copy = copies_[static_cast<size_t>(extent)];
  if (copy.is_whole) return true;
  if (copy.number > begun_copies_) KVASIR_RETURN_IF_ERROR(CarryOut(step_));
  KVASIR_RETURN_IF_ERROR(BeginChecksums());
  copy.is_whole = checksums_.IsDone(extent);
  return copy.is_whole;
}

absl::Status CudaResidency::BeginChecksums() {
  if (unsummed_.empty()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const bool is_over, copied_.IsOver());
  if (is_over) ended_copies_ = begun_copies_;
  for (; !unsummed_.empty(); unsummed_.pop_front()) {
    const ExtentCopy& copy = copies_[static_cast<size_t>(unsummed_.front())];
    if (copy.number > ended_copies_) break;
    checksums_.Begin(unsummed_.front(), copy.hash);
  }
  return absl::OkStatus();
}

void CudaResidency::Restore(int64_t extent, const kvstore::PrefixHash& hash) {
  KVASIR_CHECK(state_of(extent) == ExtentState::kNone);
  state_of(extent) = ExtentState::kSealed;
  commands_.restored.push_back(static_cast<int32_t>(extent));
  if (!uses_.empty()) uses_[static_cast<size_t>(extent)] = {};
  copies_[static_cast<size_t>(extent)] = {.hash = hash, .is_whole = true};
}

// The error, if there is one, is that of the next step.
void CudaResidency::MakeLean(int64_t lean, const kvstore::PrefixHash& /*hash*/,
                             std::optional<int64_t> from) {
  KVASIR_CHECK(state_of(lean) == ExtentState::kNone && lean >= state_.shape.num_extents);
  state_of(lean) = ExtentState::kLean;
  if (digests_.ok()) digests_ = CopyDigests(lean, from);
}

absl::Status CudaResidency::CopyDigests(int64_t lean, std::optional<int64_t> from) {
  const int64_t bounds = layout_.block_bounds_bytes();
  KVASIR_RETURN_IF_ERROR(stream_.CopyToDevice(
      bounds_.data() + lean * bounds,
      lean_bounds_[static_cast<size_t>(lean - state_.shape.num_extents)], bounds));
  if (key_codes_.size_bytes() == 0) return absl::OkStatus();
  KVASIR_CHECK(from.has_value());
  // Codes of a restored block are made when the device is told of it, from memory that may be
  // another block's after this call.
  if (!commands_.restored.empty()) {
    KVASIR_RETURN_IF_ERROR(CarryOut(step_));
    KVASIR_RETURN_IF_ERROR(stream_.Wait());
  }
  const int64_t codes = layout_.block_key_codes_bytes();
  return CudaStatus(
      cudaMemcpyAsync(key_codes_.data() + lean * codes, key_codes_.data() + *from * codes,
                      static_cast<size_t>(codes), cudaMemcpyDeviceToDevice, stream_.get()),
      "copying key codes");
}

void CudaResidency::Free(int64_t extent) {
  KVASIR_CHECK(bindings_[static_cast<size_t>(extent)] == 0);
  const ExtentState was = std::exchange(state_of(extent), ExtentState::kNone);
  // An extent that the device has not been told of is never reported to it. Its memory may belong
  // to another block at once.
  const bool is_new = std::erase(commands_.opened, static_cast<int32_t>(extent)) +
                          std::erase(commands_.restored, static_cast<int32_t>(extent)) >
                      0;
  std::erase(commands_.copied, static_cast<int32_t>(extent));
  std::erase(commands_.sealed, static_cast<int32_t>(extent));
  std::erase(asked_promotions_, static_cast<int32_t>(extent));
  std::erase(being_copied_, static_cast<int32_t>(extent));
  std::erase(unsummed_, static_cast<int32_t>(extent));
  const int64_t copy = copies_[static_cast<size_t>(extent)].number;
  if (copy > ended_copies_ && copy <= begun_copies_) copied_.Wait().IgnoreError();
  copies_[static_cast<size_t>(extent)] = {};
  if (extent < state_.shape.num_extents) checksums_.Forget(extent);
  if (!is_new && was != ExtentState::kNone) commands_.freed.push_back(static_cast<int32_t>(extent));
  if (was == ExtentState::kOpening || was == ExtentState::kOpen) --open_extents_;
}

void CudaResidency::Bind(int64_t slot, int64_t index, int64_t extent) {
  const size_t entry = static_cast<size_t>(slot * max_blocks_per_slot_ + index);
  if (block_extents_[entry] >= 0) --bindings_[static_cast<size_t>(block_extents_[entry])];
  if (extent >= 0) ++bindings_[static_cast<size_t>(extent)];
  block_extents_[entry] = static_cast<int32_t>(extent);
  if (is_rebound_[entry]) return;
  is_rebound_[entry] = true;
  commands_.bound.push_back(static_cast<int64_t>(entry));
}

void CudaResidency::Promote(int64_t extent) {
  if (state_of(extent) == ExtentState::kSealed) {
    asked_promotions_.push_back(static_cast<int32_t>(extent));
  }
}

// ---- steps

absl::StatusOr<kernels::PagedKv> CudaResidency::BeginStep(uint32_t step, bool binds_lean) {
  step_ = step;
  binds_lean_ = binds_lean;
  KVASIR_RETURN_IF_ERROR(digests_);
  PreparePromotion();
  KVASIR_RETURN_IF_ERROR(CarryOut(step));
  return kernels::PagedKv{.layout = layout_,
                          .block_extents = block_extents_table_.As<int32_t>(),
                          .num_slots = num_slots_,
                          .max_blocks_per_slot = max_blocks_per_slot_,
                          .num_extents = std::ssize(extent_states_),
                          .pages = state_.pages,
                          .bounds = bounds_table_.As<std::byte*>(),
                          .key_codes = key_codes_table_.As<std::byte*>(),
                          .accesses = {.step = step_number_.As<uint32_t>(),
                                       .last_touched = state_.last_touched,
                                       .missed_bytes = state_.missed_bytes}};
}

absl::Status CudaResidency::CarryOut(uint32_t step) {
  extents_->GiveWay();
  const cudaStream_t stream = stream_.get();
  KVASIR_RETURN_IF_ERROR(BeginChecksums());
  KVASIR_RETURN_IF_ERROR(SealCopied());
  KVASIR_RETURN_IF_ERROR(BeginCopies());
  // Slots that are still being copied from may be needed.
  const int64_t most_pinned = openable_pages() - state_.shape.max_fills;
  if (held_pages() > most_pinned && !commands_.opened.empty() && !being_copied_.empty()) {
    KVASIR_RETURN_IF_ERROR(copied_.HoldBack(stream_));
    TakeCopied();
  }
  KVASIR_ASSIGN_OR_RETURN(const DeviceCommands device,
                          upload_.Upload(commands_, block_extents_, stream_));
  KVASIR_RETURN_IF_ERROR(SealExtents(state_, device.sealed, stream));
  KVASIR_RETURN_IF_ERROR(FreeExtents(state_, device.freed, stream));
  KVASIR_RETURN_IF_ERROR(TakeRestored(device.restored));
  // Slots that are being filled belong to no extent. Where they may be needed, for opened extents
  // or for pages of lean blocks, the fills must end first.
  if (held_pages() > most_pinned && (binds_lean_ || !device.opened.empty())) {
    KVASIR_RETURN_IF_ERROR(EndFills());
  }
  KVASIR_RETURN_IF_ERROR(OpenExtents(state_, device.opened, stream));
  KVASIR_RETURN_IF_ERROR(BeginResidencyStep(step, step_number_.As<uint32_t>(), device.bound,
                                            block_extents_table_.As<int32_t>(), stream));
  KVASIR_RETURN_IF_ERROR(PromoteAsked(device, step));
  for (const int32_t extent : commands_.opened) state_of(extent) = ExtentState::kOpen;
  for (const int64_t entry : commands_.bound) is_rebound_[static_cast<size_t>(entry)] = false;
  commands_ = {};
  return absl::OkStatus();
}

absl::Status CudaResidency::BeginCopies() {
  if (commands_.copied.empty()) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(written_.Record(stream_));
  KVASIR_RETURN_IF_ERROR(written_.HoldBack(copy_stream_));
  KVASIR_RETURN_IF_ERROR(CopyExtentsToHost(
      state_, commands_.copied, {gathered_.data(), static_cast<size_t>(gathered_.size_bytes())},
      copy_stream_.get()));
  const int64_t bytes = layout_.block_bounds_bytes();
  for (const int64_t extent : commands_.copied) {
    KVASIR_RETURN_IF_ERROR(
        copy_stream_.CopyToHost(host_.bounds(extent), bounds_.data() + extent * bytes, bytes));
  }
  being_copied_.insert(being_copied_.end(), commands_.copied.begin(), commands_.copied.end());
  commands_.copied.clear();
  ++begun_copies_;
  return copied_.Record(copy_stream_);
}

absl::Status CudaResidency::SealCopied() {
  if (being_copied_.empty()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const bool is_over, copied_.IsOver());
  if (is_over) TakeCopied();
  return absl::OkStatus();
}

void CudaResidency::TakeCopied() {
  commands_.sealed.insert(commands_.sealed.end(), being_copied_.begin(), being_copied_.end());
  being_copied_.clear();
}

absl::Status CudaResidency::TakeRestored(std::span<int32_t> device_extents) {
  KVASIR_RETURN_IF_ERROR(RestoreExtents(state_, device_extents, stream_.get()));
  const int64_t bytes = layout_.block_bounds_bytes();
  for (const int64_t extent : commands_.restored) {
    KVASIR_RETURN_IF_ERROR(
        stream_.CopyToDevice(bounds_.data() + extent * bytes, host_.bounds(extent), bytes));
  }
  if (key_codes_.size_bytes() == 0) return absl::OkStatus();
  return EncodePages(layout_, state_.pages, key_codes_table_.As<std::byte*>(), device_extents,
                     stream_.get());
}

absl::Status CudaResidency::EndFills() {
  KVASIR_RETURN_IF_ERROR(filled_.HoldBack(stream_));
  return MapFills(state_, stream_.get());
}

void CudaResidency::PreparePromotion() {
  std::vector<int32_t> extents = std::exchange(asked_promotions_, {});
  std::sort(extents.begin(), extents.end());  // sequences that start together may share blocks
  extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
  std::erase_if(extents,
                [&](int32_t extent) { return bindings_[static_cast<size_t>(extent)] == 0; });
  if (extents.empty()) return;
  commands_.promoted = std::move(extents);
  commands_.running.resize(bindings_.size());
  std::transform(bindings_.begin(), bindings_.end(), commands_.running.begin(),
                 [](int32_t bindings) { return static_cast<uint8_t>(bindings > 0); });
}

absl::Status CudaResidency::PromoteAsked(const DeviceCommands& device, uint32_t step) {
  if (device.promoted.empty()) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(EndFills());
  KVASIR_RETURN_IF_ERROR(
      PlanPromotion(state_, device.promoted, device.running, step, stream_.get()));
  KVASIR_RETURN_IF_ERROR(CopyFills(state_, stream_.get()));
  return MapFills(state_, stream_.get());
}

absl::StatusOr<std::vector<kvstore::CorruptExtent>> CudaResidency::EndStep() {
  KVASIR_RETURN_IF_ERROR(EndFills());
  KVASIR_RETURN_IF_ERROR(PlanFills(state_, step_, stream_.get()));
  KVASIR_RETURN_IF_ERROR(planned_.Record(stream_));
  KVASIR_RETURN_IF_ERROR(planned_.HoldBack(fill_stream_));
  KVASIR_RETURN_IF_ERROR(CopyFills(state_, fill_stream_.get()));
  KVASIR_RETURN_IF_ERROR(filled_.Record(fill_stream_));
  const size_t parity = step_ % 2;
  ResidencyCounters& counters = counters_.As<ResidencyCounters>()[parity];
  KVASIR_RETURN_IF_ERROR(counted_[parity].Wait());  // long over: of the step before the last
  seen_ = counters;
  KVASIR_RETURN_IF_ERROR(stream_.CopyToHost(&counters, state_.counters, sizeof(ResidencyCounters)));
  KVASIR_RETURN_IF_ERROR(counted_[parity].Record(stream_));
  uses_.clear();
  if (binds_lean_) KVASIR_RETURN_IF_ERROR(stream_.Wait());
  if (seen_.without_room == 0) return std::vector<kvstore::CorruptExtent>();
  return absl::InternalError(
      absl::StrCat("residency: ", seen_.without_room, " pages of opened blocks found no slot of ",
                   state_.shape.num_slots, "; open extents have ", pinned_pages()));
}

}  // namespace kvasir::worker
