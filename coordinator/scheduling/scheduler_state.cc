#include "coordinator/scheduling/scheduler_state.h"

#include <algorithm>
#include <utility>

namespace kvasir::coordinator {
namespace {

// One in this many blocks of the device tier is left to cached pages: at least one block where
// there are two.
constexpr int64_t kDeviceReserve = 8;

int64_t DeviceShare(int64_t device_blocks) {
  return std::max<int64_t>(1, device_blocks - std::max<int64_t>(1, device_blocks / kDeviceReserve));
}

// With this many sequences decoding, a step still has 64 tokens for a prompt.
int64_t MaxRunning(const SchedulerOptions& options) {
  return std::min({options.max_num_seqs, options.max_num_batched_tokens - kBlockTokens + 1,
                   DeviceShare(options.device_blocks)});
}

}  // namespace

SchedulerState::SchedulerState(const SchedulerOptions& scheduler_options,
                               std::unique_ptr<kvstore::PrefixIndex> index)
    : options(scheduler_options),
      device_share(DeviceShare(options.device_blocks)),
      max_running(MaxRunning(options)),
      blocks(std::move(index)),
      restores(options, blocks.index(), prefill_rate),
      sequences(options.max_num_seqs, restores),
      contexts(options, blocks.index(), restores),
      exchange(options, blocks, contexts) {}

void SchedulerState::ReportProgress(Sequence& sequence, std::vector<Event>& events) const {
  const bool answers = sequence.generated() > sequence.resumed_tokens;
  if (answers || sequence.computed < sequence.reported_tokens) return;
  sequence.reported_tokens = sequence.computed;
  events.push_back(Progress(sequence));
}

ProgressEvent SchedulerState::Progress(const Sequence& sequence) const {
  ProgressEvent event = {
      .id = sequence.spec.id,
      .prompt_tokens = sequence.prompt_tokens,
      .processed_tokens = std::min(sequence.computed, sequence.prompt_tokens),
      .cached_tokens = sequence.cached_tokens,
      .sealed_tokens = std::min(sequence.sealed_blocks() * kBlockTokens, sequence.prompt_tokens),
      .eta = {},
      .attention = sequence.AttentionUntilNow()};
  if (!prefill_rate.is_known()) return event;
  int64_t ahead = 0;  // prompt tokens up to and including this sequence's
  for (const Sequence* running : sequences.running()) {
    ahead += std::max<int64_t>(0, running->prompt_tokens - running->computed);
    if (running == &sequence) break;
  }
  event.eta = prefill_rate.TimeFor(static_cast<double>(ahead));
  return event;
}

void SchedulerState::CountPrefix(const Sequence& sequence) {
  const int64_t prompt = sequence.prompt_tokens;
  const int64_t cached = sequence.cached_tokens;
  counters.prefix_queries += prompt;
  counters.prefix_hits += cached;
  if (!options.enable_prefix_caching) {
    counters.missed_disabled += prompt;
    return;
  }
  const int64_t known = std::min(prompt, std::max(sequence.known_tokens, cached));
  const int64_t shared = std::min(prompt, std::max(sequence.shareable_tokens(), known));
  counters.missed_not_restored += known - cached;
  counters.missed_absent += shared - known;
  counters.missed_unshared += prompt - shared;
}

}  // namespace kvasir::coordinator
