#include "coordinator/scheduling/attention_sums.h"

#include <algorithm>
#include <map>

namespace kvasir::coordinator {
namespace {

// Returns the 1st percentile, in steps of a thousandth: the largest that 99 % of the samples reach.
float FirstPercentile(const v1::MassSamples& mass) {
  const std::map<uint32_t, uint64_t> ascending(mass.by_permille().begin(),
                                               mass.by_permille().end());
  uint64_t below = 0;
  for (const auto& [permille, samples] : ascending) {
    below += samples;
    if (below * 100 > mass.samples()) return static_cast<float>(permille) / 1000;
  }
  return 0;
}

}  // namespace

void AddMassSamples(const v1::MassSamples& from, v1::MassSamples& to) {
  if (from.samples() == 0) return;
  to.set_minimum(to.samples() == 0 ? from.minimum() : std::min(to.minimum(), from.minimum()));
  to.set_samples(to.samples() + from.samples());
  to.set_sum(to.sum() + from.sum());
  for (const auto& [permille, samples] : from.by_permille()) {
    (*to.mutable_by_permille())[permille] += samples;
  }
}

void AddPhase(const v1::PhaseAccounting& from, v1::PhaseAccounting& to) {
  to.set_blocks_total(to.blocks_total() + from.blocks_total());
  to.set_skipped_selected_out(to.skipped_selected_out() + from.skipped_selected_out());
  to.set_skipped_window(to.skipped_window() + from.skipped_window());
  to.set_skipped_pruned(to.skipped_pruned() + from.skipped_pruned());
  to.set_skipped_terminated(to.skipped_terminated() + from.skipped_terminated());
  to.set_page_hits(to.page_hits() + from.page_hits());
  to.set_page_misses(to.page_misses() + from.page_misses());
  if (from.has_measured_mass()) {
    AddMassSamples(from.measured_mass(), *to.mutable_measured_mass());
  }
}

void AddContract(const v1::ContractReport& from, v1::ContractReport& to) {
  to.set_selections(to.selections() + from.selections());
  to.set_dense(to.dense() + from.dense());
  to.set_widened(to.widened() + from.widened());
  to.set_missed(to.missed() + from.missed());
}

v1::MassSummary Summarize(const v1::MassSamples& mass) {
  v1::MassSummary summary;
  summary.set_samples(mass.samples());
  summary.set_mean(static_cast<float>(mass.sum() / static_cast<double>(mass.samples())));
  summary.set_minimum(mass.minimum());
  summary.set_p1(FirstPercentile(mass));
  return summary;
}

}  // namespace kvasir::coordinator
