// The engine and whole blocks: what a plan says of them before it says what to compute, and what
// the rank reports of them.
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

// The worker's next group, or its end, waits for the tier. A server gives its workers 30 s at most.
constexpr absl::Duration kMostFlush = absl::Seconds(10);

}  // namespace

absl::Status Engine::CarryOutBlocks(const v1::StepPlan& plan) {
  for (const v1::BlockSeal& seal : plan.seals()) KVASIR_RETURN_IF_ERROR(slots_->Seal(seal));
  for (const uint32_t slot : plan.free_slots()) KVASIR_RETURN_IF_ERROR(slots_->Free(slot));
  for (const v1::BlockPersist& persist : plan.persists()) {
    KVASIR_RETURN_IF_ERROR(slots_->Persist(persist));
  }
  for (const v1::Erase& erase : plan.erases()) KVASIR_RETURN_IF_ERROR(slots_->Erase(erase));
  KVASIR_RETURN_IF_ERROR(slots_->PinDisk(plan));
  for (const v1::BlockExport& block : plan.exports()) slots_->Export(block);
  for (const uint64_t id : plan.drop_blocks()) {
    slots_->Drop(kernels::BlockId(static_cast<int64_t>(id)));
  }
  for (const v1::BlockRestore& restore : plan.restores()) KVASIR_RETURN_IF_ERROR(Restore(restore));
  for (const v1::BlockImport& import : plan.imports()) KVASIR_RETURN_IF_ERROR(Import(import));
  return absl::OkStatus();
}

// A block that is no longer stored is answered like one that cannot be read.
absl::Status Engine::Restore(const v1::BlockRestore& restore) {
  const absl::Status started = slots_->Restore(restore);
  if (absl::IsInternal(started)) return started;
  if (!started.ok()) {
    const kernels::BlockId id(static_cast<int64_t>(restore.block_id()));
    AddRestored({.id = id, .status = started}, tier_report_);
  }
  return absl::OkStatus();
}

absl::Status Engine::Import(const v1::BlockImport& import) {
  const absl::Status made = slots_->Import(import);
  if (absl::IsInternal(made)) return made;
  const kernels::BlockId id(static_cast<int64_t>(import.block_id()));
  AddRestored({.id = id, .status = made}, tier_report_);
  return absl::OkStatus();
}

void Engine::FlushTier() {
  if (!broken_.ok()) return;
  const absl::Status flushed = store_->Flush(kMostFlush);
  if (!flushed.ok()) spdlog::warn("{}", std::string(flushed.message()));
}

v1::TierReport Engine::TakeTierReport() {
  v1::TierReport report = std::exchange(tier_report_, {});
  for (const kvstore::RestoredBlock& restored : store_->TakeRestored()) {
    AddRestored(restored, report);
  }
  for (const kvstore::ErasedBlocks& erased : store_->TakeErased()) AddErased(erased, report);
  for (const kvstore::ExportedBlock& block : store_->TakeExported()) AddExported(block, report);
  AddChanges(store_->TakeStoredChanges(), report);
  return report;
}

}  // namespace kvasir::worker
