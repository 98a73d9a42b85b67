// A reference model that reads a document once, dense, and is then led through answers to questions
// about it, letting an observer see what attention works on: the worker's own transformer, with a
// selector that selects everything and shows what it was asked; or that says how probable a text
// is. Used by the fidelity and the perplexity program. Thread-compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/stages.h"
#include "tests/support/fake_paged_kv.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/batch/attention_meter.h"
#include "worker/batch/step_batch.h"
#include "worker/loaded_model.h"
#include "worker/parallel/single_collective.h"
#include "worker/thread_pool.h"

namespace kvasir::quality {

// Sees one layer's queries (blocks of one query each), keys and values.
using Observer = std::function<absl::Status(const kernels::SelectParams& params)>;

class ReferenceModel {
 public:
  // For sequences of up to `max_tokens`, whatever `model` says of that. Errors as of
  // worker::LoadModel.
  static absl::StatusOr<std::unique_ptr<ReferenceModel>> Load(const v1::ModelConfig& model,
                                                              const v1::KvConfig& kv,
                                                              int64_t max_tokens, int num_threads);

  // REQUIRES: called once, before Answer.
  absl::Status Read(const std::vector<int32_t>& document);

  // Goes on behind the document with `tokens`, of which the last `num_answer` are the answer, and
  // shows every layer's queries from which the answer's tokens follow. Returns how many of them
  // follow indeed: are the model's own choice.
  absl::StatusOr<int64_t> Answer(const std::vector<int32_t>& tokens, int64_t num_answer,
                                 const Observer& observer);

  // Nats of every token but the first, each given those before it: minus the sum of the logarithms
  // of their probabilities. What was read before is forgotten.
  absl::StatusOr<double> Nats(const std::vector<int32_t>& tokens);

  kernels::Executor& executor() { return executor_; }

 private:
  class ObservingSelector;

  explicit ReferenceModel(int num_threads);
  absl::Status Init(const v1::ModelConfig& model, const v1::KvConfig& kv, int64_t max_tokens);
  void ClearKv();
  absl::Status Forward(worker::StepBatch& batch, worker::StepResult& result);
  worker::RowWork Row(int64_t begin, int64_t end) const;

  worker::ThreadPool executor_;
  worker::CpuBackend backend_{executor_};
  worker::LoadedModel loaded_;
  worker::SingleCollective collective_;
  worker::AttentionMeter meter_{0};
  worker::Activations activations_;
  int64_t max_tokens_ = 0;
  std::optional<kernels::FakePagedKv> kv_;
  std::vector<worker::ServedSelector> selectors_;  // to read with, to answer with
  ObservingSelector* observing_ = nullptr;         // the second of them
  worker::Sequence sequence_;
  int64_t document_size_ = 0;
};

}  // namespace kvasir::quality
