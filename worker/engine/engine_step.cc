#include "worker/engine/engine_step.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>

#include "worker/batch/prompt_scoring.h"
#include "xxhash.h"

namespace kvasir::worker {
namespace {

void AddMasses(std::span<const float> masses, v1::MassSamples& samples) {
  samples.set_samples(masses.size());
  samples.set_minimum(*std::min_element(masses.begin(), masses.end()));
  double sum = 0;
  for (const float mass : masses) {
    sum += mass;
    ++(*samples.mutable_by_permille())[static_cast<uint32_t>(mass * 1000)];
  }
  samples.set_sum(sum);
}

// Zeros are left out, here and below: a reply has a row for each token of a step.
void FillPhase(const AttentionCounts& counts, std::span<const float> masses,
               v1::PhaseAccounting& accounting) {
  accounting.set_blocks_total(static_cast<uint64_t>(counts.total));
  accounting.set_skipped_selected_out(static_cast<uint64_t>(counts.selected_out));
  accounting.set_skipped_window(static_cast<uint64_t>(counts.window));
  accounting.set_skipped_pruned(static_cast<uint64_t>(counts.pruned));
  accounting.set_skipped_terminated(static_cast<uint64_t>(counts.terminated));
  accounting.set_page_hits(static_cast<uint64_t>(counts.device_reads));
  accounting.set_page_misses(static_cast<uint64_t>(counts.host_reads));
  if (!masses.empty()) AddMasses(masses, *accounting.mutable_measured_mass());
}

void FillAccounting(const EngineRow& row, const AttentionMeter& meter,
                    v1::RowAccounting& accounting) {
  accounting.set_cached_device_tokens(static_cast<uint32_t>(row.cached.device_tokens));
  accounting.set_cached_host_tokens(static_cast<uint32_t>(row.cached.host_tokens));
  accounting.set_cached_disk_tokens(static_cast<uint32_t>(row.cached.disk_tokens));
  accounting.set_cached_peer_tokens(static_cast<uint32_t>(row.cached.peer_tokens));
  accounting.set_disk_page_waits(static_cast<uint64_t>(row.waits.pages));
  accounting.set_disk_wait_s(row.waits.seconds);
  if (row.computed < 0) return;
  const RowAttention& attention = meter.row(row.computed);
  for (const Phase phase : {Phase::kPrefill, Phase::kDecode}) {
    const AttentionCounts& counts = attention.counts[static_cast<size_t>(phase)];
    const std::span<const float> masses = attention.masses[static_cast<size_t>(phase)];
    if (counts == AttentionCounts() && masses.empty()) continue;
    FillPhase(
        counts, masses,
        phase == Phase::kPrefill ? *accounting.mutable_prefill() : *accounting.mutable_decode());
  }
  // Generated tokens only: a prompt does not reuse selections.
  const AttentionCounts& counts = attention.counts[static_cast<size_t>(Phase::kDecode)];
  if (counts.stages_run[0] + counts.stages_reused[0] > 0) {
    accounting.mutable_stages_run()->Add(counts.stages_run.begin(), counts.stages_run.end());
    accounting.mutable_stages_reused()->Add(counts.stages_reused.begin(),
                                            counts.stages_reused.end());
  }
  accounting.set_attended_tokens(static_cast<uint64_t>(
      std::accumulate(attention.budgets.begin(), attention.budgets.end(), int64_t{0})));
  accounting.set_attending_rows(attention.budgets.size());
  if (!attention.estimates.empty()) {
    AddMasses(attention.estimates, *accounting.mutable_estimated_mass());
  }
  if (attention.contract.rows == 0) return;
  v1::ContractReport& contract = *accounting.mutable_contract();
  contract.set_selections(static_cast<uint64_t>(attention.contract.rows));
  contract.set_dense(static_cast<uint64_t>(attention.contract.dense));
  contract.set_widened(static_cast<uint64_t>(attention.contract.widened));
  contract.set_missed(static_cast<uint64_t>(attention.contract.missed));
}

void FillSelections(const ObservedPages& observed, v1::SelectionMap& map) {
  map.set_num_pages(static_cast<uint32_t>(observed.num_pages));
  map.set_pages_per_column(static_cast<uint32_t>(observed.pages_per_column));
  map.set_num_columns(static_cast<uint32_t>(observed.num_columns));
  map.set_num_heads(static_cast<uint32_t>(observed.num_heads));
  map.mutable_counts()->Add(observed.counts.begin(), observed.counts.end());
}

}  // namespace

EngineRow& EngineStep::RowOf(size_t work) {
  return *std::find_if(rows.begin(), rows.end(), [work](const EngineRow& row) {
    return row.computed == static_cast<int64_t>(work);
  });
}

void TakeScores(std::span<const kernels::SampledToken> scores, int64_t vocab_size, Answers answers,
                SlotTable& slots, EngineStep& step) {
  std::span<const kernels::TokenLogprob> tops = step.score_tops;
  for (size_t r = 0; r < step.works.size(); ++r) {
    const RowWork& work = step.works[r];
    const auto count = static_cast<size_t>(work.score_end - work.score_begin);
    if (count == 0) continue;
    const size_t num_tops = count * TopCount(*work.sequence, vocab_size);
    const auto own = scores.first(count);
    const auto failed =
        std::find_if(own.begin(), own.end(), [](const auto& score) { return !score.status.ok(); });
    if (failed != own.end()) {
      Sequence& sequence = slots.at(work.slot);
      if (sequence.failed.ok()) sequence.failed = failed->status;
    } else if (answers == Answers::kAll) {
      step.RowOf(r).prompt_logprobs = PromptLogprobs(work, own, tops.first(num_tops));
    }
    scores = scores.subspan(count);
    tops = tops.subspan(num_tops);
  }
}

void FillResults(const EngineStep& step, SlotTable& slots, v1::StepReply& reply) {
  std::vector<int64_t> sampled;  // the ranks must agree on these
  for (const EngineRow& row : step.rows) {
    const Sequence& sequence = slots.at(row.slot);
    v1::RowResult& result = *reply.add_results();
    result.set_slot(static_cast<uint32_t>(row.slot));
    if (row.token >= 0) sampled.insert(sampled.end(), {row.slot, row.token});
    if (!sequence.failed.ok()) {
      result.set_error_code(static_cast<int32_t>(sequence.failed.code()));
      result.set_error_message(std::string(sequence.failed.message()));
    } else {
      if (row.token >= 0) result.set_token_id(static_cast<uint32_t>(row.token));
      if (row.logprobs.has_value()) *result.mutable_logprobs() = *row.logprobs;
      if (row.prompt_logprobs.has_value()) {
        *result.mutable_prompt_logprobs() = *row.prompt_logprobs;
      }
    }
    FillAccounting(row, step.meter, *result.mutable_accounting());
    if (row.computed >= 0 && step.works[static_cast<size_t>(row.computed)].observe) {
      FillSelections(step.meter.row(row.computed).observed, *result.mutable_selections());
    }
  }
  reply.set_token_hash(XXH3_64bits(sampled.data(), sampled.size() * sizeof(int64_t)));
}

}  // namespace kvasir::worker
