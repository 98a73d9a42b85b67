// State of a plan from its beginning to its reply: what the engine must still know when the device
// is done, while the next plan may have begun. Private to the engine. Plain data and a function
// without state.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/kvasir/v1/worker.pb.h"
#include "worker/batch/attention_meter.h"
#include "worker/batch/row_sampling.h"
#include "worker/batch/step_batch.h"
#include "worker/engine/slot_table.h"

namespace kvasir::worker {

// One row of the plan.
struct EngineRow {
  int64_t slot = 0;
  int32_t token = -1;  // sampled
  std::optional<v1::TokenLogprobs> logprobs = {};
  std::optional<v1::PromptLogprobs> prompt_logprobs = {};
  CachedPrefix cached = {};
  kvstore::SlotWaits waits = {};
  int64_t computed = -1;  // index into works; -1: not computed
};

struct EngineStep {
  explicit EngineStep(double mass_sample_rate) : meter(mass_sample_rate) {}

  // Returns the plan's row that the index-th of `works` computes.
  EngineRow& RowOf(size_t work);

  std::chrono::steady_clock::time_point begun;
  v1::StepReply reply;  // the part that is known so far
  std::vector<EngineRow> rows;
  std::vector<RowWork> works;                        // of the rows that are computed
  StepBatch batch;                                   // of works
  std::vector<RowSamplingBuffers> sampling_buffers;  // of the rows that sample
  std::vector<kernels::TokenLogprob> score_tops;     // of the scored tokens, side by side
  AttentionMeter meter;
};

// Whether the rank's answers have log probabilities of prompts. All ranks find the same ones, so
// one of them sends them.
enum class Answers { kAll, kNoScores };

// Stores the scores of the step's scored tokens in its rows. Fails the sequences with one that
// could not be found.
void TakeScores(std::span<const kernels::SampledToken> scores, int64_t vocab_size, Answers answers,
                SlotTable& slots, EngineStep& step);

// Adds the results of the rows and the hash of the sampled tokens. REQUIRES: the slots are taken.
void FillResults(const EngineStep& step, SlotTable& slots, v1::StepReply& reply);

}  // namespace kvasir::worker
