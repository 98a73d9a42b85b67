#include "coordinator/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::PrefixHash;

// Part of the device tier that is left to cached pages.
constexpr int64_t kDeviceReserve = 8;  // one in so many blocks, at least one where there are two

// Beside decoding sequences a chunk is no more work than a whole one behind so many tokens.
constexpr int64_t kReferenceContext = 4096;

// What a refused client is told to wait, between these two.
constexpr absl::Duration kShortestRetry = absl::Seconds(1);
constexpr absl::Duration kLongestRetry = absl::Seconds(60);

int64_t DeviceShare(int64_t device_blocks) {
  return std::max<int64_t>(1, device_blocks - std::max<int64_t>(1, device_blocks / kDeviceReserve));
}

// With so many sequences decoding, a step still has 64 tokens for a prompt.
int64_t MaxRunning(const SchedulerOptions& options) {
  return std::min({options.max_num_seqs, options.max_num_batched_tokens - kBlockTokens + 1,
                   DeviceShare(options.device_blocks)});
}

// Blocks that are left free when a request joins others, one in so many: room for the next tokens.
constexpr int64_t kWatermark = 64;

bool IsEmpty(const v1::StepPlan& plan) {
  return plan.rows().empty() && plan.seals().empty() && plan.free_slots().empty() &&
         plan.persists().empty() && plan.drop_blocks().empty() && plan.restores().empty();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(
    const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index) {
  KVASIR_CHECK(options.num_ranks >= 1);
  if (options.device_blocks < 1 || index->stats().capacity_blocks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the workers hold ", options.device_blocks, " blocks in the device tier and ",
                     index->stats().capacity_blocks,
                     " in the host tier; raise --kv-device-size-gb or --kv-host-size-gb"));
  }
  if (options.max_num_seqs < 1 || options.max_num_batched_tokens < kBlockTokens ||
      options.max_num_batched_tokens % kBlockTokens != 0 || options.max_queue_len < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_num_seqs is ", options.max_num_seqs, ", max_num_batched_tokens ",
        options.max_num_batched_tokens, ", max_queue_len ", options.max_queue_len,
        "; needed: at least 1, a positive multiple of ", kBlockTokens, ", at least 0"));
  }
  return std::unique_ptr<Scheduler>(new Scheduler(options, std::move(index)));
}

Scheduler::Scheduler(const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index)
    : options_(options),
      device_share_(DeviceShare(options.device_blocks)),
      max_running_(MaxRunning(options)),
      blocks_(std::move(index)),
      index_(&blocks_.index()),
      stored_(options.num_ranks) {
  for (int64_t slot = options_.max_num_seqs - 1; slot >= 0; --slot) idle_slots_.push_back(slot);
}

Scheduler::~Scheduler() = default;

absl::Status Scheduler::Add(SequenceSpec spec) {
  KVASIR_CHECK(!spec.prompt.empty() && spec.max_tokens >= 1 && !sequences_.contains(spec.id));
  KVASIR_RETURN_IF_ERROR(CheckQueue(static_cast<int64_t>(spec.prompt.size())));
  const PrefixHash scope =
      kvstore::HashScope({.tenant = spec.tenant,
                          .weights_hash = options_.weights_hash,
                          .kv_form = options_.kv_form,
                          .prefill_policy = CanonicalBytes(spec.policy.prefill)});
  auto sequence = std::make_unique<Sequence>(std::move(spec), scope);
  const int64_t capacity = index_->stats().capacity_blocks;
  if (sequence->blocks_at_most() > capacity) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a prompt of ", sequence->prompt_tokens, " tokens and max_tokens of ",
                     sequence->spec.max_tokens, " need ", sequence->blocks_at_most(), " blocks of ",
                     kBlockTokens, " tokens, the host tier of a worker holds ", capacity,
                     "; shorten the prompt, lower max_tokens, or raise --kv-host-size-gb"));
  }
  waiting_.push_back(sequence.get());
  sequences_.emplace(sequence->spec.id, std::move(sequence));
  return absl::OkStatus();
}

absl::Status Scheduler::CheckQueue(int64_t prompt_tokens) const {
  const int64_t startable =
      max_running_ - static_cast<int64_t>(running_.size() + restoring_.size());
  const int64_t waiting = static_cast<int64_t>(waiting_.size());
  const int64_t waiting_tokens = WaitingTokens();
  absl::Status full;
  if (waiting >= options_.max_queue_len + startable) {
    full = absl::ResourceExhaustedError(
        absl::StrCat(waiting, " requests wait and ", running_.size(),
                     " run; try again later, or raise ", "--max-queue-len"));
  } else if (waiting > 0 && waiting_tokens + prompt_tokens > options_.max_queued_tokens) {
    full = absl::ResourceExhaustedError(absl::StrCat(
        waiting, " requests with ", waiting_tokens, " prompt tokens wait, and this one has ",
        prompt_tokens, "; at most ", options_.max_queued_tokens,
        " may wait: try again later, or raise --max-queued-tokens"));
  }
  if (full.ok()) return full;
  // About when one of those that wait has been read.
  const double seconds_per_token =
      recent_prefill_tokens_ > 0 ? recent_prefill_seconds_ / recent_prefill_tokens_ : 0;
  const double mean_tokens =
      static_cast<double>(waiting_tokens) / static_cast<double>(std::max<int64_t>(1, waiting));
  return proto::WithRetryDelay(full, std::clamp(absl::Seconds(mean_tokens * seconds_per_token),
                                                kShortestRetry, kLongestRetry));
}

int64_t Scheduler::WaitingTokens() const {
  int64_t tokens = 0;
  for (const Sequence* sequence : waiting_) tokens += sequence->prompt_tokens;
  return tokens;
}

std::optional<FinishEvent> Scheduler::Cancel(SequenceId id, const absl::Status& why,
                                             TimePoint now) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return std::nullopt;
  return End(*sequence, why, v1::FINISH_REASON_UNSPECIFIED, Blocks::kKeep, now);
}

std::optional<FinishEvent> Scheduler::StopEarly(SequenceId id, TimePoint now) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return std::nullopt;
  return End(*sequence, absl::OkStatus(), v1::FINISH_REASON_STOP, Blocks::kKeep, now);
}

// --- planning -----------------------------------------------------------------------------------

Scheduler::Planned Scheduler::NextPlan(TimePoint now) {
  KVASIR_CHECK(unanswered_plans() < kMostPlans);
  Planned planned;
  const bool ahead = !unanswered_.empty();
  if (ahead && !MayPlanAhead()) return planned;
  v1::StepPlan plan;
  Unanswered& made = unanswered_.emplace_back();
  made.step = step_ + 1;
  made.planned_at = now;
  GiveUpLateRestores(now);
  for (Sequence* sequence : running_) SealFullBlocks(*sequence, Private::kSeal, plan);
  LetGoOfRetired(plan);
  Budget budget = StepBudget();
  PlanDecodes(plan, budget);
  budget.device_blocks = device_share_ - UnsealedBlocks();
  PlanPassing(now, plan, budget, planned.events);
  PlanPrompts(plan, budget);
  AdmitRestored(now, plan, budget, planned.events);
  AdmitWaiting(now, plan, budget, planned.events);
  for (BlockId id : index_->TakeDropped()) {
    plan.add_drop_blocks(static_cast<uint64_t>(id.value));
  }
  if (IsEmpty(plan)) {
    unanswered_.pop_back();
    return planned;
  }
  if (ahead) ++counters_.plans_ahead;
  made.starts_sequences = !plan.starts().empty();
  plan.set_group_epoch(options_.group_epoch);
  plan.set_step(++step_);
  planned.plan = std::move(plan);
  return planned;
}

void Scheduler::SealFullBlocks(Sequence& sequence, Private unpublished, v1::StepPlan& plan) {
  const int64_t full = sequence.computed / kBlockTokens;
  for (int64_t i = sequence.sealed_blocks(); i < full; ++i) {
    // What the decode part had a hand in is of use to this sequence only, once it is preempted.
    const bool own = !sequence.decode_part.KeyOf(i).empty();
    const auto tokens = sequence.block_tokens(i);
    const PrefixHash parent = sequence.chain();
    const PrefixHash hash = kvstore::HashBlock(parent, tokens, sequence.decode_part.KeyOf(i));
    sequence.hashes.push_back(hash);
    const Block& block = sequence.blocks[static_cast<size_t>(i)];
    const Block before = i == 0 ? Block() : sequence.blocks[static_cast<size_t>(i) - 1];
    const bool published =
        options_.enable_prefix_caching && !own &&
        index_->Publish(
            {.block = block, .before = before, .parent = parent, .hash = hash, .tokens = tokens});
    if (!published && unpublished == Private::kSkip) continue;
    v1::BlockSeal& seal = *plan.add_seals();
    seal.set_block_id(static_cast<uint64_t>(block.id().value));
    seal.set_prefix_hash(hash.data(), hash.size());
    unanswered_.back().sealed.push_back(block.id().value);
  }
}

void Scheduler::LetGoOfRetired(v1::StepPlan& plan) {
  for (Retired& retired : retired_) {
    Sequence& sequence = *retired.sequence;
    if (!sequence.admitted()) continue;  // its start was taken back
    if (retired.blocks == Blocks::kKeep) {
      SealFullBlocks(sequence, Private::kSkip, plan);
      PersistBlocks(sequence,
                    std::min(sequence.sealed_blocks(), sequence.private_begin / kBlockTokens),
                    plan);
    }
    plan.add_free_slots(static_cast<uint32_t>(sequence.slot));
    idle_slots_.push_back(sequence.slot);
  }
  retired_.clear();
}

void Scheduler::PlanDecodes(v1::StepPlan& plan, Budget& budget) {
  for (size_t i = 0; i < running_.size(); ++i) {  // preempting makes it shorter, from behind
    Sequence& sequence = *running_[i];
    if (sequence.reading() || sequence.is_planned_out()) continue;
    if (MakeRoomForToken(sequence, plan)) AddRow(sequence, 1, plan, budget);
  }
}

void Scheduler::PlanPrompts(v1::StepPlan& plan, Budget& budget) {
  for (Sequence* sequence : running_) {
    if (!sequence->reading() || HasRow(*sequence)) continue;
    const int64_t num_tokens = ChunkTokens(*sequence, budget);
    if (num_tokens > 0) AddRow(*sequence, num_tokens, plan, budget);
  }
}

// They were at the head of the queue when they began to restore.
void Scheduler::AdmitRestored(TimePoint now, v1::StepPlan& plan, Budget& budget,
                              std::vector<Event>& events) {
  for (size_t i = 0; i < restoring_.size();) {
    Sequence& sequence = *restoring_[i];
    if (sequence.restores_pending > 0) {
      ++i;
      continue;
    }
    if (!HasRoom(sequence, budget)) return;
    ForgetRestores(sequence);
    Admit(sequence, now, plan, budget, events);
  }
}

void Scheduler::AdmitWaiting(TimePoint now, v1::StepPlan& plan, Budget& budget,
                             std::vector<Event>& events) {
  for (size_t i = 0; i < waiting_.size();) {
    Sequence& sequence = *waiting_[i];
    if (static_cast<int64_t>(running_.size() + restoring_.size()) >= max_running_) return;
    if (IsOnItsWay(sequence)) {
      ++i;
      continue;
    }
    if (!HasRoom(sequence, budget)) return;
    if (!AdmitOrSkip(i, now, plan, budget, events)) return;
  }
}

bool Scheduler::IsOnItsWay(const Sequence& sequence) const {
  return sequence.waits_for.has_value() && restoring_hashes_.contains(*sequence.waits_for);
}

bool Scheduler::AdmitOrSkip(size_t& i, TimePoint now, v1::StepPlan& plan, Budget& budget,
                            std::vector<Event>& events) {
  Sequence& sequence = *waiting_[i];
  const Reserved reserved = TryReserve(sequence, now, plan);
  if (reserved == Reserved::kNoRoom) return false;
  if (reserved == Reserved::kLater) {
    ++i;
    return true;
  }
  waiting_.erase(waiting_.begin() + static_cast<int64_t>(i));
  if (reserved == Reserved::kReady) Admit(sequence, now, plan, budget, events);
  return true;
}

// With so much left its first chunk is not empty, however much of it is cached.
bool Scheduler::HasRoom(const Sequence& sequence, const Budget& budget) {
  return budget.tokens >= std::min(sequence.given_tokens, kBlockTokens) &&
         budget.device_blocks >= 1 && budget.work > 0;
}

// The blocks that it has by now are those of its cached prefix.
void Scheduler::Admit(Sequence& sequence, TimePoint now, v1::StepPlan& plan, Budget& budget,
                      std::vector<Event>& events) {
  sequence.computed = sequence.num_blocks() * kBlockTokens;
  if (sequence.preemptions == 0) {
    sequence.cached_tokens = sequence.computed;
    sequence.admitted_at = now;
    counters_.prefix_queries += sequence.prompt_tokens;
    counters_.prefix_hits += sequence.cached_tokens;
  }
  const auto younger = [](const Sequence* a, const Sequence* b) { return a->spec.id < b->spec.id; };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, younger),
                  &sequence);
  sequence.slot = idle_slots_.back();
  idle_slots_.pop_back();
  AddStart(sequence, plan);
  AddRow(sequence, ChunkTokens(sequence, budget), plan, budget);
  unanswered_.back().rows.back().starts = true;
  ReportProgress(sequence, events);
}

// Takes hold of what is cached of the tokens to read, and reserves the rest of their blocks.
Scheduler::Reserved Scheduler::TryReserve(Sequence& sequence, TimePoint now, v1::StepPlan& plan) {
  const int64_t unreserved = blocks_.unreserved();
  if (did_not_fit_ == sequence.spec.id && unreserved <= did_not_fit_blocks_) {
    return Reserved::kNoRoom;
  }
  kvstore::PrefixMatch match;
  if (options_.enable_prefix_caching) {
    match = index_->Match(sequence.scope, sequence.matchable(), sequence.decode_part);
  }
  const std::vector<PrefixHash> stored = MatchStored(sequence, match, now);
  const auto on_its_way =
      std::find_if(stored.begin(), stored.end(),
                   [this](const PrefixHash& hash) { return restoring_hashes_.contains(hash); });
  if (on_its_way != stored.end()) {
    sequence.waits_for = *on_its_way;
    return Reserved::kLater;
  }
  const int64_t needed = sequence.blocks_to_read() - static_cast<int64_t>(match.blocks.size());
  // Matched blocks that were idle are no longer available.
  if (needed + SpareBlocks() > blocks_.unreserved()) {
    did_not_fit_ = sequence.spec.id;
    did_not_fit_blocks_ = unreserved;
    return Reserved::kNoRoom;
  }
  sequence.reservation = blocks_.Reserve(needed);
  sequence.blocks = std::move(match.blocks);
  sequence.hashes = std::move(match.hashes);
  if (stored.empty()) return Reserved::kReady;
  StartRestoring(sequence, stored, now, plan);
  return Reserved::kRestoring;
}

// Left free when a request is admitted.
int64_t Scheduler::SpareBlocks() const {
  const bool alone = running_.empty() && restoring_.empty();
  return alone ? 0 : 1 + index_->stats().capacity_blocks / kWatermark;
}

Scheduler::Budget Scheduler::StepBudget() const {
  const bool decodes = std::any_of(running_.begin(), running_.end(),
                                   [](const Sequence* sequence) { return !sequence->reading(); });
  const int64_t whole_chunk =
      options_.max_num_batched_tokens * (options_.attention_parity_tokens + kReferenceContext);
  return {.tokens = options_.max_num_batched_tokens,
          .device_blocks = device_share_,
          .work = decodes ? whole_chunk : std::numeric_limits<int64_t>::max()};
}

// Of the next chunk of a prompt, in units of attending to one token.
int64_t Scheduler::WorkPerToken(const Sequence& sequence) const {
  const v1::AttentionPolicy& prefill = sequence.spec.policy.prefill;
  int64_t attended = sequence.planned_end() + kBlockTokens;
  if (IsSparse(prefill)) {
    attended = std::min(attended, int64_t{prefill.sink_tokens()} + prefill.window_tokens() +
                                      prefill.token_budget() + kBlockTokens);
  }
  return options_.attention_parity_tokens + attended;
}

// Chunks end at multiples of 64 or at the prompt's end; 0 when there is no room for one.
int64_t Scheduler::ChunkTokens(const Sequence& sequence, const Budget& budget) const {
  int64_t rest = sequence.given_tokens - sequence.planned_end();
  if (sequence.ReadsAnswerOneByOne()) {
    rest = std::max<int64_t>(1, sequence.prompt_tokens - sequence.planned_end());
  }
  if (budget.work <= 0 || budget.device_blocks <= 0) return 0;
  const int64_t affordable = std::max(kBlockTokens, budget.work / WorkPerToken(sequence));
  const int64_t room = std::min({budget.tokens, budget.device_blocks * kBlockTokens, affordable});
  return rest <= room ? rest : room / kBlockTokens * kBlockTokens;
}

void Scheduler::AddRow(Sequence& sequence, int64_t num_tokens, v1::StepPlan& plan, Budget& budget) {
  const int64_t end = sequence.planned_end() + num_tokens;
  const bool sample = end == sequence.planned_length();
  unanswered_.back().rows.push_back({.id = sequence.spec.id,
                                     .slot = sequence.slot,
                                     .num_tokens = num_tokens,
                                     .blocks_before = sequence.num_blocks(),
                                     .sample = sample});
  if (sequence.reading()) {
    unanswered_.back().prefill_tokens += num_tokens;
    budget.work -= num_tokens * WorkPerToken(sequence);
  }
  v1::StepRow& row = *plan.add_rows();
  row.set_slot(static_cast<uint32_t>(sequence.slot));
  row.set_begin(static_cast<uint32_t>(sequence.planned_end()));
  row.set_num_tokens(static_cast<uint32_t>(num_tokens));
  row.set_sample(sample);
  // Blocks for what it reads were reserved at admission; for what it generates MakeRoomForToken was
  // asked.
  while (sequence.num_blocks() * kBlockTokens < end) {
    row.add_new_blocks(static_cast<uint64_t>(sequence.TakeBlock().value));
    --budget.device_blocks;
  }
  budget.tokens -= num_tokens;
  sequence.unanswered_tokens += num_tokens;
  sequence.unanswered_samples += sample ? 1 : 0;
}

void Scheduler::AddStart(const Sequence& sequence, v1::StepPlan& plan) const {
  v1::SequenceStart& start = *plan.add_starts();
  start.set_slot(static_cast<uint32_t>(sequence.slot));
  start.set_sequence_id(static_cast<uint64_t>(sequence.spec.id.value));
  start.mutable_tokens()->Reserve(static_cast<int>(sequence.length()));
  for (int32_t token : sequence.tokens) start.add_tokens(static_cast<uint32_t>(token));
  start.set_num_prompt_tokens(static_cast<uint32_t>(sequence.prompt_tokens));
  for (const Block& block : sequence.blocks) {
    start.add_cached_blocks(static_cast<uint64_t>(block.id().value));
  }
  *start.mutable_sampling() = sequence.spec.sampling;
  const ResolvedPolicy& policy = sequence.spec.policy;
  start.set_policy_index(policy.index);
  *start.mutable_prefill() = policy.prefill;
  *start.mutable_decode() = policy.decode;
  start.set_tail_tokens(policy.tail_tokens);
}

// --- ends ---------------------------------------------------------------------------------------

FinishEvent Scheduler::End(Sequence& sequence, const absl::Status& status, v1::FinishReason reason,
                           Blocks blocks, TimePoint now) {
  FinishEvent event = {.id = sequence.spec.id,
                       .status = status,
                       .summary = sequence.Summary(reason, options_.mass_unmeasured, now)};
  sequence.reservation.Release();
  auto owned = std::move(sequences_.extract(sequence.spec.id).mapped());
  if (sequence.admitted()) {
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
    retired_.push_back({.sequence = std::move(owned), .blocks = blocks});
  } else if (const auto waiting = std::find(waiting_.begin(), waiting_.end(), &sequence);
             waiting != waiting_.end()) {
    waiting_.erase(waiting);
  } else {
    ForgetRestores(sequence);
  }
  return event;
}

std::vector<Event> Scheduler::FailAll(const absl::Status& why, TimePoint now) {
  std::vector<SequenceId> ids;
  for (const auto& [id, sequence] : sequences_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  std::vector<Event> events;
  for (SequenceId id : ids) {
    events.push_back(End(*Find(id), why, v1::FINISH_REASON_UNSPECIFIED, Blocks::kDiscard, now));
  }
  for (const Retired& retired : retired_) {
    if (retired.sequence->admitted()) idle_slots_.push_back(retired.sequence->slot);
  }
  retired_.clear();
  unanswered_.clear();
  return events;
}

Sequence* Scheduler::Find(SequenceId id) {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second.get();
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counters_;
  stats.running = static_cast<int64_t>(running_.size());
  stats.waiting = static_cast<int64_t>(waiting_.size());
  stats.restoring = static_cast<int64_t>(restoring_.size());
  stats.disk_set_aside = disk_pause_ > absl::ZeroDuration();
  stats.waiting_tokens = WaitingTokens();
  stats.index = index_->stats();
  stats.stored = stored_.stats();
  return stats;
}

}  // namespace kvasir::coordinator
