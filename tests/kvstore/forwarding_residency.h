// A residency that passes everything on to another, for tests that change one thing.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvstore/tiers/page_residency.h"

namespace kvasir::kvstore {

class ForwardingResidency : public PageResidency {
 public:
  explicit ForwardingResidency(std::unique_ptr<PageResidency> inner) : inner_(std::move(inner)) {}

  HostSlab& host() override { return inner_->host(); }
  absl::Status AwaitExtent(int64_t extent) override { return inner_->AwaitExtent(extent); }
  bool IsExtentThere(int64_t extent) override { return inner_->IsExtentThere(extent); }
  absl::Status Open(int64_t extent) override { return inner_->Open(extent); }
  absl::Status Seal(int64_t extent, const PrefixHash& hash) override {
    return inner_->Seal(extent, hash);
  }
  bool SealsAtOnce() const override { return inner_->SealsAtOnce(); }
  absl::StatusOr<bool> IsExtentWhole(int64_t extent) override {
    return inner_->IsExtentWhole(extent);
  }
  void Restore(int64_t extent, const PrefixHash& hash) override { inner_->Restore(extent, hash); }
  void MakeLean(int64_t lean, const PrefixHash& hash, std::optional<int64_t> from) override {
    inner_->MakeLean(lean, hash, from);
  }
  uint32_t LastRead(int64_t extent) const override { return inner_->LastRead(extent); }
  void Free(int64_t extent) override { inner_->Free(extent); }
  void Bind(int64_t slot, int64_t index, int64_t extent) override {
    inner_->Bind(slot, index, extent);
  }
  int64_t BoundExtent(int64_t slot, int64_t index) const override {
    return inner_->BoundExtent(slot, index);
  }
  void Promote(int64_t extent) override { inner_->Promote(extent); }
  int64_t PagesInDevice(int64_t extent) const override { return inner_->PagesInDevice(extent); }
  absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step, bool binds_lean) override {
    return inner_->BeginStep(step, binds_lean);
  }
  absl::StatusOr<std::vector<CorruptExtent>> EndStep() override { return inner_->EndStep(); }
  void EndSteps() override { inner_->EndSteps(); }
  int64_t device_pages() const override { return inner_->device_pages(); }
  int64_t openable_pages() const override { return inner_->openable_pages(); }
  int64_t pinned_pages() const override { return inner_->pinned_pages(); }
  ResidencyStats stats() const override { return inner_->stats(); }
  absl::Status CheckIntegrity() const override { return inner_->CheckIntegrity(); }

 private:
  const std::unique_ptr<PageResidency> inner_;
};

}  // namespace kvasir::kvstore
