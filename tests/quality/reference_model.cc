#include "tests/quality/reference_model.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/all/all_selector.h"

namespace kvasir::quality {

using kernels::kPageTokens;

namespace {

constexpr int64_t kChunk = 512;         // tokens of the document in one step
constexpr int64_t kAnswerTokens = 128;  // of a question with its answer, at most

// Surprise of `token`: minus the logarithm of its softmax.
double NatsOf(std::span<const float> logits, int32_t token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[static_cast<size_t>(token)];
}

}  // namespace

class ReferenceModel::ObservingSelector final : public kernels::AllSelector {
 public:
  absl::Status Select(const kernels::SelectParams& params, kernels::PageSelection& out,
                      kernels::Executor& executor) const override {
    KVASIR_RETURN_IF_ERROR(AllSelector::Select(params, out, executor));
    // The last blocks are those of the answer.
    kernels::SelectParams shown = params;
    shown.tiles = params.tiles.last(static_cast<size_t>(num_shown));
    shown.numbers = params.numbers.last(static_cast<size_t>(num_shown));
    return (*observer)(shown);
  }

  const Observer* observer = nullptr;
  int64_t num_shown = 0;
};

absl::StatusOr<std::unique_ptr<ReferenceModel>> ReferenceModel::Load(const v1::ModelConfig& model,
                                                                     const v1::KvConfig& kv,
                                                                     int64_t max_tokens,
                                                                     int num_threads) {
  std::unique_ptr<ReferenceModel> loaded(new ReferenceModel(num_threads));
  KVASIR_RETURN_IF_ERROR(loaded->Init(model, kv, max_tokens + kAnswerTokens));
  return loaded;
}

ReferenceModel::ReferenceModel(int num_threads) : executor_(num_threads) {
  auto observing = std::make_unique<ObservingSelector>();
  observing_ = observing.get();
  selectors_.resize(2);
  selectors_[0].selector = std::make_unique<kernels::AllSelector>();
  selectors_[1].selector = std::move(observing);
  for (worker::ServedSelector& served : selectors_) served.dense = true;
  sequence_.prefill = {.selector = 0, .numbers = {.window_tokens = 1}};
  sequence_.decode = {.selector = 1, .numbers = {.window_tokens = 1}};
}

absl::Status ReferenceModel::Init(const v1::ModelConfig& model, const v1::KvConfig& kv,
                                  int64_t max_tokens) {
  worker::LoadModelOptions options = {.model = model, .kv = kv, .progress = [](auto, double) {}};
  options.model.set_max_model_len(static_cast<uint32_t>(max_tokens));
  options.model.set_allow_long_max_model_len(true);
  KVASIR_ASSIGN_OR_RETURN(loaded_, worker::LoadModel(options, backend_));
  max_tokens_ = max_tokens;
  ClearKv();
  KVASIR_ASSIGN_OR_RETURN(
      activations_, worker::Activations::Create(
                        backend_, loaded_.transformer->activation_sizes(kChunk, kAnswerTokens)));
  return absl::OkStatus();
}

void ReferenceModel::ClearKv() {
  kv_.emplace(loaded_.transformer->kv_layout(loaded_.kv_dtype), 1,
              (max_tokens_ + kPageTokens - 1) / kPageTokens);
}

worker::RowWork ReferenceModel::Row(int64_t begin, int64_t end) const {
  return {.slot = 0, .begin = begin, .num_tokens = end - begin, .sequence = &sequence_};
}

absl::Status ReferenceModel::Forward(worker::StepBatch& batch, worker::StepResult& result) {
  kv_->Grow(0, batch.positions.back() + 1);
  meter_.BeginStep(batch);
  KVASIR_RETURN_IF_ERROR(loaded_.transformer->Forward({.batch = batch,
                                                       .kv = kv_->View(),
                                                       .activations = activations_,
                                                       .meter = meter_,
                                                       .collective = collective_}));
  return backend_.Collect(result);
}

absl::Status ReferenceModel::Read(const std::vector<int32_t>& document) {
  sequence_.tokens = document;
  document_size_ = sequence_.decode_begin = std::ssize(document);
  for (int64_t begin = 0; begin < document_size_; begin += kChunk) {
    const worker::RowWork row = Row(begin, std::min(begin + kChunk, document_size_));
    worker::StepBatch batch = worker::MakeStepBatch(std::span(&row, 1), selectors_);
    worker::StepResult result;
    KVASIR_RETURN_IF_ERROR(Forward(batch, result));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ReferenceModel::Answer(const std::vector<int32_t>& tokens,
                                               int64_t num_answer, const Observer& observer) {
  if (std::ssize(tokens) > kAnswerTokens) {
    return absl::InvalidArgumentError(absl::StrCat("a question with its answer has ", tokens.size(),
                                                   " tokens; at most ", kAnswerTokens,
                                                   " are foreseen"));
  }
  sequence_.tokens.resize(static_cast<size_t>(document_size_));
  sequence_.tokens.insert(sequence_.tokens.end(), tokens.begin(), tokens.end());
  const worker::RowWork row = Row(document_size_, std::ssize(sequence_.tokens) - 1);
  worker::StepBatch batch = worker::MakeStepBatch(std::span(&row, 1), selectors_);
  for (int64_t i = batch.num_tokens() - num_answer; i < batch.num_tokens(); ++i) {
    batch.sampled_tokens.push_back(i);
    batch.sampled_rows.push_back(0);
    batch.sampling.push_back({.wants_logprob = false});  // greedy
  }
  observing_->observer = &observer;
  observing_->num_shown = num_answer;
  worker::StepResult result;
  KVASIR_RETURN_IF_ERROR(Forward(batch, result));
  int64_t right = 0;
  for (int64_t i = 0; i < num_answer; ++i) {
    right += result.tokens[static_cast<size_t>(i)].token ==
             tokens[tokens.size() - static_cast<size_t>(num_answer - i)];
  }
  return right;
}

absl::StatusOr<double> ReferenceModel::Nats(const std::vector<int32_t>& tokens) {
  ClearKv();
  sequence_.tokens = tokens;
  const int64_t last = std::ssize(tokens) - 1;
  sequence_.decode_begin = last;
  double nats = 0;
  for (int64_t begin = 0; begin < last; begin += kAnswerTokens) {
    const worker::RowWork row = Row(begin, std::min(begin + kAnswerTokens, last));
    worker::StepBatch batch = worker::MakeStepBatch(std::span(&row, 1), selectors_);
    batch.keeps_logits = true;
    for (int64_t i = 0; i < batch.num_tokens(); ++i) {
      batch.sampled_tokens.push_back(i);
      batch.sampled_rows.push_back(0);
      batch.sampling.push_back({.wants_logprob = false});
    }
    worker::StepResult result;
    KVASIR_RETURN_IF_ERROR(Forward(batch, result));
    const auto vocab = static_cast<size_t>(result.logits.dim(1));
    for (int64_t i = 0; i < batch.num_tokens(); ++i) {
      const float* logits = result.logits.As<float>() + i * result.logits.dim(1);
      nats += NatsOf(std::span(logits, vocab), tokens[static_cast<size_t>(begin + i + 1)]);
    }
  }
  return nats;
}

}  // namespace kvasir::quality
