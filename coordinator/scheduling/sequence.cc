#include "coordinator/scheduling/sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/duration.pb.h"

#include "coordinator/scheduling/attention_sums.h"
#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

google::protobuf::Duration ToProto(TimePoint from, TimePoint to) {
  const int64_t nanos = std::max<int64_t>(0, absl::ToInt64Nanoseconds(Between(from, to)));
  google::protobuf::Duration duration;
  duration.set_seconds(nanos / 1'000'000'000);
  duration.set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
  return duration;
}

v1::BlocksSkipped Skipped(const v1::PhaseAccounting& phase) {
  v1::BlocksSkipped skipped;
  skipped.set_selected_out(phase.skipped_selected_out());
  skipped.set_window(phase.skipped_window());
  skipped.set_pruned(phase.skipped_pruned());
  skipped.set_terminated(phase.skipped_terminated());
  return skipped;
}

// Says why the phase, which has no samples, has none. `ranks`: why the ranks measure nothing, if
// they do not.
v1::MassUnmeasured WhyUnmeasured(const v1::PhaseAccounting& phase,
                                 const v1::AttentionPolicy& policy, v1::MassUnmeasured ranks) {
  if (phase.blocks_total() == 0) return v1::MASS_UNMEASURED_NOTHING_COMPUTED;
  if (!IsSparse(policy)) return v1::MASS_UNMEASURED_DENSE;
  return ranks == v1::MASS_UNMEASURED_UNSPECIFIED ? v1::MASS_UNMEASURED_NOT_DRAWN : ranks;
}

kvstore::DecodePart MakeDecodePart(const ResolvedPolicy& policy, int64_t begin) {
  return {.begin = begin, .key = absl::StrCat(CanonicalBytes(policy.decode), "@", begin)};
}

}  // namespace

Sequence::Sequence(SequenceSpec s, const kvstore::PrefixHash& prefix_scope)
    : spec(std::move(s)),
      prompt_tokens(std::ssize(spec.prompt)),
      resumed_tokens(std::ssize(spec.answer)),
      private_begin(PrivateBegin(spec.policy, prompt_tokens)),
      decode_part(MakeDecodePart(spec.policy, private_begin)),
      scope(prefix_scope),
      owner(kvstore::HashOwner(spec.tenant)),
      tokens(std::move(spec.prompt)),
      given_tokens(prompt_tokens + resumed_tokens),
      generated_at_loss(resumed_tokens),
      last_token_at(spec.arrival) {
  tokens.insert(tokens.end(), spec.answer.begin(), spec.answer.end());
  spec.answer = {};
  if (spec.is_read_elsewhere) {
    state = State::kElsewhere;
    read_elsewhere = 0;
  }
}

absl::Span<const int32_t> Sequence::matchable() const {
  if (scored < to_score()) {
    return absl::MakeConstSpan(tokens).first(static_cast<size_t>(scored + 1));
  }
  if (preemptions > 0 || resumed_tokens > 0) return tokens;
  // Match leaves at least one token to compute, so it is given one more than whole blocks.
  const int64_t whole = std::min(private_begin, prompt_tokens) / kBlockTokens * kBlockTokens;
  return absl::MakeConstSpan(tokens).first(static_cast<size_t>(std::min(prompt_tokens, whole + 1)));
}

bool Sequence::IsStopToken(int32_t token) const {
  const auto& stops = spec.sampling.stop_token_ids();
  return std::find(stops.begin(), stops.end(), static_cast<uint32_t>(token)) != stops.end();
}

kvstore::BlockId Sequence::TakeBlock() {
  blocks.push_back(reservation.Take());
  return blocks.back().id();
}

void Sequence::GiveBackBlocks(int64_t num_to_keep) {
  while (num_blocks() > num_to_keep) {
    blocks.pop_back();
    reservation.TakeBack();
  }
}

void Sequence::LoseBlock(int64_t index) {
  const auto lost = static_cast<size_t>(index);
  if (index >= num_blocks()) {
    std::erase_if(later_blocks, [&](const LaterBlock& later) { return later.index == index; });
  } else {
    std::vector<LaterBlock> later;
    for (size_t i = lost + 1; i < blocks.size(); ++i) {
      later.push_back({static_cast<int64_t>(i), std::move(blocks[i]), hashes[i]});
    }
    later_blocks.insert(later_blocks.begin(), std::move_iterator(later.begin()),
                        std::move_iterator(later.end()));
    blocks.resize(lost);
    hashes.resize(lost);
  }
  reservation.TakeBack();
}

kvstore::BlockId Sequence::TakeLaterBlock(int64_t index, const kvstore::PrefixHash& hash) {
  later_blocks.push_back({.index = index, .block = reservation.Take(), .hash = hash});
  return later_blocks.back().block.id();
}

void Sequence::GiveBackLaterBlocks(int64_t index) {
  while (!later_blocks.empty() && later_blocks.back().index >= index) {
    later_blocks.pop_back();
    reservation.TakeBack();
  }
}

std::optional<int64_t> Sequence::BlockAfterGap(int64_t n) const {
  int64_t next = num_blocks();
  for (const LaterBlock& later : later_blocks) {
    if (later.index != next && --n == 0) return later.index;
    next = later.index + 1;
  }
  return std::nullopt;
}

void Sequence::JoinLaterBlocks() {
  auto next = later_blocks.begin();
  for (; next != later_blocks.end() && next->index == num_blocks(); ++next) {
    blocks.push_back(std::move(next->block));
    hashes.push_back(next->hash);
  }
  later_blocks.erase(later_blocks.begin(), next);
  computed = num_blocks() * kBlockTokens;
}

bool Sequence::Publish(int64_t index, kvstore::PrefixIndex& prefix_index) const {
  const auto i = static_cast<size_t>(index);
  return prefix_index.Publish({.block = blocks[i],
                               .before = i == 0 ? kvstore::Block() : blocks[i - 1],
                               .parent = i == 0 ? scope : hashes[i - 1],
                               .hash = hashes[i],
                               .tokens = block_tokens(index),
                               .owner = owner});
}

void Sequence::LeaveGroup() {
  unanswered_tokens = 0;
  unanswered_samples = 0;
  restore_tried = false;
  is_read_further = false;
  known_tokens = 0;
  waits_for.reset();
  long_since.reset();
}

Sequence::RowKind Sequence::KindOfRow(bool starts) const {
  if (!starts || preemptions > joins) return RowKind::kOther;
  return preemptions == 0 ? RowKind::kFirst : RowKind::kJoin;
}

// A resumed answer's tokens are not counted. Of the blocks of a later start, the ranks name the
// tier of those that are used for the first time only: the sequence had the others before.
void Sequence::CountCached(const v1::RowAccounting& row, RowKind kind) {
  if (kind == RowKind::kOther) return;
  v1::CachedTokens& sums = cached_by_tier;
  const int64_t joined = int64_t{row.cached_disk_tokens()} + row.cached_peer_tokens();
  const int64_t begin = kind == RowKind::kFirst ? 0 : computed - joined;
  auto prompt_left =
      static_cast<uint32_t>(std::max<int64_t>(0, std::min(computed, prompt_tokens) - begin));
  const auto of_prompt = [&prompt_left](uint32_t cached) {
    const uint32_t counted = std::min(cached, prompt_left);
    prompt_left -= counted;
    return counted;
  };
  if (kind == RowKind::kFirst) {
    sums.set_device(of_prompt(row.cached_device_tokens()));
    sums.set_host(of_prompt(row.cached_host_tokens()));
  }
  sums.set_disk(sums.disk() + of_prompt(row.cached_disk_tokens()));
  sums.set_peer(sums.peer() + of_prompt(row.cached_peer_tokens()));
}

void Sequence::Account(const v1::RowAccounting& row, RowKind kind) {
  CountCached(row, kind);
  AddPhase(row.prefill(), prefill);
  AddPhase(row.decode(), decode);
  attended_tokens += row.attended_tokens();
  attending_rows += row.attending_rows();
  disk_page_waits += row.disk_page_waits();
  disk_wait_s += row.disk_wait_s();
  AddMassSamples(row.estimated_mass(), estimated_mass);
  AddContract(row.contract(), contract);
}

v1::PromptLogprobs Sequence::Scores(v1::PromptLogprobs scores) const {
  const auto begin = tokens.begin() + scores.index();
  scores.mutable_token_ids()->Assign(begin, begin + scores.logprobs_size());
  if (scores.index() == 1) scores.set_first_token_id(static_cast<uint32_t>(tokens.front()));
  return scores;
}

AttentionSoFar Sequence::AttentionUntilNow() const {
  AttentionSoFar sums = {.estimated_samples = estimated_mass.samples(),
                         .estimated_mass = estimated_mass.sum()};
  for (const v1::PhaseAccounting* phase : {&prefill, &decode}) {
    sums.blocks_total += phase->blocks_total();
    sums.blocks_skipped += proto::SkippedPages(Skipped(*phase));
    sums.measured_samples += phase->measured_mass().samples();
    sums.measured_mass += phase->measured_mass().sum();
  }
  return sums;
}

v1::AttentionReport Sequence::Report(v1::MassUnmeasured unmeasured) const {
  v1::AttentionReport report;
  report.set_prefill_blocks_total(prefill.blocks_total());
  report.set_decode_blocks_total(decode.blocks_total());
  *report.mutable_prefill_blocks_skipped() = Skipped(prefill);
  *report.mutable_decode_blocks_skipped() = Skipped(decode);
  report.set_device_page_hits(prefill.page_hits() + decode.page_hits());
  report.set_device_page_misses(prefill.page_misses() + decode.page_misses());
  report.set_disk_page_waits(disk_page_waits);
  report.set_disk_wait_s(disk_wait_s);
  if (prefill.measured_mass().samples() > 0) {
    *report.mutable_prefill_measured_mass() = Summarize(prefill.measured_mass());
  } else {
    report.set_prefill_mass_unmeasured(WhyUnmeasured(prefill, spec.policy.prefill, unmeasured));
  }
  if (decode.measured_mass().samples() > 0) {
    *report.mutable_decode_measured_mass() = Summarize(decode.measured_mass());
  } else {
    report.set_decode_mass_unmeasured(WhyUnmeasured(decode, spec.policy.decode, unmeasured));
  }
  if (attending_rows > 0) {
    report.set_decode_budget_tokens(static_cast<double>(attended_tokens) /
                                    static_cast<double>(attending_rows));
  }
  if (estimated_mass.samples() > 0) *report.mutable_estimated_mass() = Summarize(estimated_mass);
  if (contract.selections() > 0) *report.mutable_contract() = contract;
  return report;
}

v1::Finish Sequence::Summary(v1::FinishReason reason, v1::MassUnmeasured unmeasured,
                             TimePoint now) const {
  v1::Finish finish;
  finish.set_reason(reason);
  if (matched_stop_token.has_value()) finish.set_matched_token_id(*matched_stop_token);
  v1::Usage& usage = *finish.mutable_usage();
  usage.set_prompt_tokens(static_cast<uint32_t>(prompt_tokens));
  usage.set_completion_tokens(static_cast<uint32_t>(generated()));
  *usage.mutable_cached_tokens() = cached_by_tier;
  *finish.mutable_attention() = Report(unmeasured);
  v1::Timing& timing = *finish.mutable_timing();
  *timing.mutable_queue() = ToProto(spec.arrival, admitted_at.value_or(now));
  if (restores_since.has_value()) {
    *timing.mutable_restore() = ToProto(*restores_since, admitted_at.value_or(now));
  }
  if (first_token_at.has_value()) {
    *timing.mutable_time_to_first_token() = ToProto(spec.arrival, *first_token_at);
    *timing.mutable_decode() = ToProto(*first_token_at, last_token_at);
  }
  return finish;
}

}  // namespace kvasir::coordinator
