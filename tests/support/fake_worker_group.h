// A worker group of one rank on paper, for tests of what stands above it: forms and steps at once,
// or when the test lets it, and fails when the test says so. Thread-safe.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/group/worker_group.h"
#include "kernels/base/mutex.h"
#include "tests/support/symbolic_worker.h"

namespace kvasir::testing {

class FakeWorkerGroup : public coordinator::WorkerGroup {
 public:
  explicit FakeWorkerGroup(const SymbolicWorkerOptions& options, int64_t max_model_len = 10000)
      : options_(options), max_model_len_(max_model_len) {}

  // --- WorkerGroup ---

  absl::StatusOr<coordinator::GroupInfo> Form() override {
    kernels::MutexLock lock(mu_);
    ++forms_;
    changed_.NotifyAll();
    while (hold_forms_ && !interrupted_) changed_.Wait(mu_);
    if (interrupted_) return absl::CancelledError("interrupted");
    if (!form_errors_.empty()) {
      const absl::Status error = form_errors_.front();
      form_errors_.pop_front();
      return error;
    }
    worker_ = std::make_unique<SymbolicWorker>(options_);
    if (lost_worker_ != nullptr) inventory_ = worker_->TakeOverDisk(*lost_worker_);
    if (on_tier_report_) on_tier_report_();
    return coordinator::GroupInfo{.epoch = ++epoch_,
                                  .weights_hash = std::string(32, 'w'),
                                  .kv_form = "rotated/float32",
                                  .device_blocks = options_.device_blocks,
                                  .host_blocks = options_.host_blocks,
                                  .disk_blocks = options_.disk_blocks,
                                  .vocab_size = options_.vocab_size,
                                  .max_model_len = max_model_len_,
                                  .addresses = {"paper"},
                                  .ranks = {v1::Ready()}};
  }

  absl::Status Send(const v1::StepPlan& plan) override {
    kernels::MutexLock lock(mu_);
    if (interrupted_) return absl::CancelledError("interrupted");
    plans_.push_back(plan);
    return absl::OkStatus();
  }
  absl::StatusOr<v1::StepReply> AwaitReply() override {
    kernels::MutexLock lock(mu_);
    const v1::StepPlan plan = plans_.front();
    plans_.pop_front();
    ++steps_begun_;
    changed_.NotifyAll();
    while (hold_steps_ && steps_allowed_ == 0 && !interrupted_) changed_.Wait(mu_);
    if (hold_steps_ && steps_allowed_ > 0) --steps_allowed_;
    if (interrupted_) return absl::CancelledError("interrupted");
    if (step_error_.has_value()) return *std::exchange(step_error_, std::nullopt);
    absl::StatusOr<v1::StepReply> reply = worker_->Execute(plan);
    if (!reply.ok()) illegal_ = reply.status();
    changed_.NotifyAll();
    if (reply.ok() && corrupt_) std::exchange(corrupt_, nullptr)(*reply);
    if (reply.ok() && on_tier_report_) on_tier_report_();
    return reply;
  }
  std::vector<coordinator::RankTierReport> TakeTierReports() override {
    kernels::MutexLock lock(mu_);
    if (worker_ == nullptr) return {};
    v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
    changed_.NotifyAll();
    return {{.rank = 0, .report = std::exchange(inventory_, {})},
            {.rank = 0, .report = std::move(report)}};
  }

  void Disband() override {
    kernels::MutexLock lock(mu_);
    if (worker_ != nullptr) lost_worker_ = std::move(worker_);  // its disk outlives it
    plans_.clear();
    changed_.NotifyAll();
  }
  void Interrupt() override {
    kernels::MutexLock lock(mu_);
    interrupted_ = true;
    changed_.NotifyAll();
  }
  void SetLossCallback(std::function<void(const absl::Status&)> on_loss) override {
    on_loss_ = std::move(on_loss);
  }
  void SetProgressCallback(std::function<void(const std::string&)>) override {}
  void SetTierReportCallback(std::function<void()> on_report) override {
    on_tier_report_ = std::move(on_report);
  }

  // --- the test ---

  void FailForm(const absl::Status& error) {
    kernels::MutexLock lock(mu_);
    form_errors_.push_back(error);
  }
  void FailNextStep(const absl::Status& error) {
    kernels::MutexLock lock(mu_);
    step_error_ = error;
  }
  void CorruptNextReply(std::function<void(v1::StepReply&)> corrupt) {
    kernels::MutexLock lock(mu_);
    corrupt_ = std::move(corrupt);
  }
  // Steps (or forms) begin and then wait until they are released.
  void HoldSteps() { Set(hold_steps_, true); }
  void ReleaseSteps() { Set(hold_steps_, false); }
  void HoldForms() { Set(hold_forms_, true); }
  void ReleaseForms() { Set(hold_forms_, false); }
  void AllowSteps(int64_t n) {
    kernels::MutexLock lock(mu_);
    steps_allowed_ += n;
    changed_.NotifyAll();
  }
  // A rank dies while no step runs.
  void Lose(const absl::Status& why) { on_loss_(why); }

  // Each returns false when it did not come true within a minute.
  bool AwaitStepsBegun(int64_t n) {
    return Await([&] { return steps_begun_ >= n; });
  }
  bool AwaitForms(int64_t n) {
    return Await([&] { return forms_ >= n; });
  }
  // Nothing runs on the rank, and only `blocks` cached blocks are kept.
  bool AwaitIdle(int64_t blocks) {
    return Await([&] {
      return worker_ != nullptr && worker_->num_sequences() == 0 && worker_->num_blocks() == blocks;
    });
  }
  // The rank's disk holds `blocks`: what is being written when a rank dies is lost.
  bool AwaitStored(int64_t blocks) {
    return Await([&] { return worker_ != nullptr && worker_->num_stored() == blocks; });
  }
  bool AwaitSequences(int64_t n) {
    return Await([&] { return worker_ != nullptr && worker_->num_sequences() == n; });
  }
  int64_t steps_begun() const {
    kernels::MutexLock lock(mu_);
    return steps_begun_;
  }
  int64_t disk_reads() const {
    kernels::MutexLock lock(mu_);
    return worker_ == nullptr ? 0 : worker_->reads();
  }
  int64_t forms() const {
    kernels::MutexLock lock(mu_);
    return forms_;
  }
  // The first plan that the rank could not carry out; OK when there was none.
  absl::Status illegal_plan() const {
    kernels::MutexLock lock(mu_);
    return illegal_;
  }

 private:
  void Set(bool& flag, bool value) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    flag = value;
    changed_.NotifyAll();
  }
  bool Await(const std::function<bool()>& condition) EXCLUDES(mu_) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    kernels::MutexLock lock(mu_);
    while (!condition()) {
      if (!changed_.WaitUntil(mu_, deadline)) return condition();
    }
    return true;
  }

  const SymbolicWorkerOptions options_;
  const int64_t max_model_len_;
  std::function<void(const absl::Status&)> on_loss_;
  std::function<void()> on_tier_report_;

  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::unique_ptr<SymbolicWorker> worker_;
  std::unique_ptr<SymbolicWorker> lost_worker_;
  v1::TierReport inventory_;
  std::deque<v1::StepPlan> plans_;  // unanswered
  std::deque<absl::Status> form_errors_;
  std::optional<absl::Status> step_error_;
  std::function<void(v1::StepReply&)> corrupt_;
  absl::Status illegal_;
  uint64_t epoch_ = 0;
  int64_t forms_ = 0;
  int64_t steps_begun_ = 0;
  int64_t steps_allowed_ = 0;
  bool hold_steps_ = false;
  bool hold_forms_ = false;
  bool interrupted_ = false;
};

}  // namespace kvasir::testing
