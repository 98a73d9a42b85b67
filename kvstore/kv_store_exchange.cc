// The KV store and bytes of blocks that leave it for elsewhere, and come from there: parts by KV
// head, which every degree has.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kvstore/format/head_extent.h"
#include "kvstore/kv_store_impl.h"

namespace kvasir::kvstore {

void KvStoreImpl::Export(uint64_t ticket, BlockId id) {
  KVASIR_CHECK(!in_step_);
  exports_.emplace_back(ticket, id);
}

void KvStoreImpl::AdvanceExports() {
  for (; !exports_.empty(); exports_.pop_front()) {
    const auto& [ticket, id] = exports_.front();
    absl::StatusOr<std::vector<ExportedBlock::Part>> parts = PartsOf(id);
    if (absl::IsUnavailable(parts.status())) return;
    ExportedBlock exported = {.ticket = ticket, .status = parts.status()};
    if (parts.ok()) exported.parts = *std::move(parts);
    exported_.push_back(std::move(exported));
  }
}

absl::StatusOr<std::vector<ExportedBlock::Part>> KvStoreImpl::PartsOf(BlockId id) const {
  const auto is_due = [id](const DueHeader& due) { return due.id == id; };
  if (std::any_of(due_headers_.begin(), due_headers_.end(), is_due)) {
    return absl::UnavailableError("the block is still being copied to the host tier");
  }
  if (!Holds(id) || !blocks_.at(id).sealed) {
    return absl::NotFoundError(absl::StrCat("block ", id.value, " is not held"));
  }
  const BlockState& state = blocks_.at(id);
  if (IsLean(state)) {
    return absl::FailedPreconditionError(
        "pages of it lie on disk only, as --kv-on-demand-size-gb lets them; export it from a "
        "server without that flag");
  }
  const absl::Span<std::byte> extent = host_.extent(state.extent);
  KVASIR_ASSIGN_OR_RETURN(const BlockIdentity block, format_.ReadHeader(extent));
  if (block.hash != state.hash) return absl::DataLossError("its header names another block");
  KVASIR_RETURN_IF_ERROR(format_.Verify(block, extent));
  std::vector<ExportedBlock::Part> parts;
  for (int64_t i = 0; i < layout_.num_kv_heads; ++i) {
    const int64_t head = format_.shard().first_head + i;
    KVASIR_ASSIGN_OR_RETURN(const HeadExtent part,
                            HeadExtent::Create(format_, {.first = head, .count = 1}));
    std::vector<std::byte> bytes(static_cast<size_t>(part.format().extent_bytes()));
    part.Gather(block, extent, absl::MakeSpan(bytes));
    parts.push_back({.head = head, .extent = std::move(bytes)});
  }
  return parts;
}

absl::Status KvStoreImpl::Import(BlockId id, const BlockIdentity& block,
                                 absl::Span<const HeadPart> parts) {
  KVASIR_CHECK(!in_step_);
  if (blocks_.contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("block ", id.value, " is open or kept already"));
  }
  KVASIR_ASSIGN_OR_RETURN(const int64_t number, TakeHostExtent(id));
  const absl::Span<std::byte> extent = host_.extent(number);
  absl::Status put = AwaitMemory(number);
  if (put.ok()) put = PutParts(block.hash, parts, extent);
  if (!put.ok()) {
    FreeIfUnused(id);
    return put;
  }
  BlockIdentity sealed = block;
  sealed.generation = next_generation_++;
  format_.WriteHeader(sealed, extent);
  BlockState& state = blocks_.at(id);
  state.hash = sealed.hash;
  state.owner = sealed.owner;
  state.generation = sealed.generation;
  state.sealed = true;
  state.kept = true;
  host_.MarkWhole(number);
  Lend(state);
  pages_->Restore(number, sealed.hash);
  if (lean_ != nullptr) unwritten_.push_back({.id = id, .block = sealed});
  if (adopted_.Drop(sealed.hash)) ReportIfForgotten(sealed.hash);
  return absl::OkStatus();
}

absl::Status KvStoreImpl::PutParts(const PrefixHash& hash, absl::Span<const HeadPart> parts,
                                   absl::Span<std::byte> extent) const {
  for (int64_t i = 0; i < layout_.num_kv_heads; ++i) {
    const int64_t head = format_.shard().first_head + i;
    KVASIR_ASSIGN_OR_RETURN(const HeadExtent own,
                            HeadExtent::Create(format_, {.first = head, .count = 1}));
    const auto part = std::find_if(parts.begin(), parts.end(),
                                   [head](const HeadPart& given) { return given.head == head; });
    if (part == parts.end()) {
      return absl::NotFoundError(absl::StrCat("KV head ", head, " is missing"));
    }
    KVASIR_ASSIGN_OR_RETURN(const BlockIdentity found, own.format().ReadHeader(part->extent));
    if (found.hash != hash) return absl::DataLossError("it is another block, or another tenant's");
    KVASIR_RETURN_IF_ERROR(own.format().Verify(found, part->extent));
    own.Scatter(part->extent, extent);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
