#include "worker/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/backend/memory_limit.h"
#include "worker/batch/prompt_scoring.h"

namespace kvasir::worker {
namespace {

using kernels::kPageTokens;

// Tiers sized by the machine hold at most this many contexts of the longest kind for each sequence
// that may run: more prefixes are not worth their bookkeeping.
constexpr int64_t kUsefulContexts = 16;

// Rows of logits that there is room for at least: tokens of prompts are scored in groups of so
// many.
constexpr int64_t kScoredRows = 64;

// Token with which a sequence continues that has failed to sample, until the coordinator removes
// it.
constexpr int32_t kTokenOfFailure = 0;

}  // namespace

kvstore::KvShard KvShardOf(const EngineOptions& options, const Transformer& model) {
  return {.layout = model.kv_layout(options.kv_dtype),
          .weights_hash = options.weights_hash,
          .kv_form = options.kv_form,
          .first_layer = 0,
          .first_head = model.options().shard.kv_heads.begin};
}

Engine::Engine(const EngineOptions& options, Transformer& model, Collective& collective)
    : options_(options),
      model_(model),
      collective_(collective),
      steps_{EngineStep(options.mass_sample_rate), EngineStep(options.mass_sample_rate)} {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       Transformer& model, Collective& collective,
                                                       std::unique_ptr<kvstore::Tier> below) {
  auto engine = std::unique_ptr<Engine>(new Engine(options, model, collective));
  KVASIR_RETURN_IF_ERROR(engine->Init(std::move(below)));
  return engine;
}

absl::Status Engine::Init(std::unique_ptr<kvstore::Tier> below) {
  layout_ = model_.kv_layout(options_.kv_dtype);
  const int64_t max_model_len = model_.options().max_model_len;
  const int64_t vocab_size = model_.options().config.vocab_size;
  SlotTableOptions slots = {.num_slots = options_.max_num_seqs,
                            .max_model_len = max_model_len,
                            .vocab_size = vocab_size,
                            .pages_per_block = layout_.pages_per_block(),
                            .num_layers = layout_.num_layers,
                            .layer_windows = model_.options().config.layer_windows};
  for (const v1::SparsityPolicy& policy : options_.policies) {
    KVASIR_ASSIGN_OR_RETURN(const int64_t prefill,
                            selectors_.Add(policy.prefill(), model_.options()));
    KVASIR_ASSIGN_OR_RETURN(const int64_t decode,
                            selectors_.Add(policy.decode(), model_.options()));
    slots.policies.push_back({.prefill = policy.prefill(),
                              .decode = policy.decode(),
                              .prefill_selector = prefill,
                              .decode_selector = decode,
                              .decode_is_dense = selectors_.at(decode).dense});
  }
  const std::vector<int64_t>& windows = model_.options().config.layer_windows;
  int64_t of_windows = 0;
  if (!windows.empty()) {
    v1::AttentionPolicy streaming;
    streaming.mutable_streaming();
    KVASIR_ASSIGN_OR_RETURN(of_windows, selectors_.Add(streaming, model_.options()));
  }
  KVASIR_RETURN_IF_ERROR(model_.backend().CheckPolicies(options_.policies, model_.options(),
                                                        options_.on_demand_bytes > 0));
  KVASIR_RETURN_IF_ERROR(selectors_.Prepare(model_.backend()));
  if (!windows.empty()) windows_ = {.tokens = windows, .served = &selectors_.at(of_windows)};
  const auto enter = [this](absl::string_view stage) {
    if (options_.on_stage) options_.on_stage(stage);
  };
  enter("warming up");
  const int64_t max_tokens = options_.max_num_batched_tokens;
  const int64_t logits_rows = std::max(options_.max_num_seqs, std::min(kScoredRows, max_tokens));
  KVASIR_ASSIGN_OR_RETURN(
      activations_,
      Activations::Create(model_.backend(), model_.activation_sizes(max_tokens, logits_rows)));
  KVASIR_RETURN_IF_ERROR(model_.WarmUp(activations_, options_.max_num_batched_tokens));
  enter("taking memory for KV");
  const int64_t dense_tokens = ReadsDensely(slots) ? max_model_len : 0;
  KVASIR_RETURN_IF_ERROR(model_.backend().ReserveForPrompts(layout_, dense_tokens));
  KVASIR_ASSIGN_OR_RETURN(const KvSizes sizes, SizeTiers());
  KVASIR_ASSIGN_OR_RETURN(
      store_, kvstore::KvStore::Create(
                  {.shard = KvShardOf(options_, model_),
                   .device_bytes = sizes.device,
                   .host_bytes = sizes.host,
                   .num_slots = options_.max_num_seqs,
                   .max_blocks_per_slot = (max_model_len + kPageTokens - 1) / kPageTokens,
                   .key_codes = AnyNeedsKeyCodes(),
                   .memory = options_.memory,
                   .owner = absl::StrCat("rank ", collective_.rank(), " of ", collective_.size()),
                   .on_demand_bytes = options_.on_demand_bytes,
                   .num_threads = model_.backend().executor().num_threads()},
                  std::move(below), [this](const kvstore::ResidencyOptions& options) {
                    return model_.backend().MakeResidency(options);
                  }));
  slots_ = std::make_unique<SlotTable>(std::move(slots), *store_);
  return absl::OkStatus();
}

// Memory is measured after everything else has been taken, and the least of any rank counts.
absl::StatusOr<KvSizes> Engine::SizeTiers() {
  if (options_.kv.device != 0 && options_.kv.host != 0) return options_.kv;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> device,
                          model_.backend().DeviceMemoryLeft(options_.gpu_memory_utilization));
  // Memory that the host tier has kept from an earlier group is left for it.
  const int64_t kept = options_.memory == nullptr ? 0 : options_.memory->held_bytes();
  KVASIR_ASSIGN_OR_RETURN(
      const MemoryLeft left,
      LeastMemoryLeft({.host = HostMemoryLeft() + kept, .device = device}, collective_));
  const int64_t max_blocks = (model_.options().max_model_len + kPageTokens - 1) / kPageTokens;
  const int64_t codes = AnyNeedsKeyCodes() ? layout_.block_key_codes_bytes() : 0;
  const int64_t digests = layout_.block_bounds_bytes() + codes;
  return ChooseKvSizes(
      {.given = options_.kv,
       .ranks_on_machine = options_.ranks_on_machine,
       .most = kUsefulContexts * options_.max_num_seqs * max_blocks * layout_.block_bytes(),
       .host_digests =
           static_cast<double>(digests) / static_cast<double>(layout_.block_bytes() + codes),
       .other_digests = options_.on_demand_bytes / layout_.block_bytes() * digests},
      left);
}

bool Engine::ReadsDensely(const SlotTableOptions& slots) const {
  return std::any_of(slots.policies.begin(), slots.policies.end(), [this](const auto& policy) {
    return selectors_.at(policy.prefill_selector).dense;
  });
}

bool Engine::AnyNeedsKeyCodes() const {
  return selectors_.NeedsKeyCodes() ||
         std::any_of(options_.policies.begin(), options_.policies.end(),
                     [](const auto& policy) { return policy.decode().quality().min_mass() > 0; });
}

absl::StatusOr<v1::StepReply> Engine::Step(const v1::StepPlan& plan) {
  KVASIR_RETURN_IF_ERROR(Begin(plan));
  return Finish();
}

// Plans that change more than the rows' own tokens and blocks wait: sequences start and leave, and
// memory is taken and given back, only with nothing in flight.
bool Engine::MayBegin(const v1::StepPlan& plan) const {
  if (begun_ == finished_) return true;
  if (begun_ - finished_ == kMostSteps || !model_.backend().RunsAhead()) return false;
  if (!plan.free_slots().empty() || !plan.persists().empty() || !plan.drop_blocks().empty() ||
      !plan.restores().empty() || !plan.starts().empty() || !plan.erases().empty() ||
      !plan.imports().empty()) {
    return false;
  }
  int64_t opened = 0;  // at most
  for (const v1::StepRow& row : plan.rows()) opened += row.num_tokens() / kPageTokens + 1;
  if (!store_->MayRunAhead(opened)) return false;
  return std::all_of(plan.rows().begin(), plan.rows().end(), [this](const v1::StepRow& row) {
    const Sequence* sequence = slots_->Find(row.slot());
    return sequence != nullptr && !CountsTokens(sequence->sampling) &&
           int64_t{row.begin()} == sequence->kv_length &&
           (sequence->memory != nullptr || !Remembers(*sequence));
  });
}

absl::Status Engine::Begin(const v1::StepPlan& plan) {
  KVASIR_RETURN_IF_ERROR(broken_);
  EngineStep& step = steps_[begun_ % kMostSteps];
  step.begun = std::chrono::steady_clock::now();
  broken_ = CarryOut(plan, step);
  ++begun_;
  return broken_;
}

absl::StatusOr<v1::StepReply> Engine::Finish() {
  KVASIR_RETURN_IF_ERROR(broken_);
  KVASIR_CHECK(begun_ > finished_);
  EngineStep& step = steps_[finished_ % kMostSteps];
  broken_ = Collect(step);
  ++finished_;
  KVASIR_RETURN_IF_ERROR(broken_);
  v1::StepReply reply = std::move(step.reply);
  FillReply(step, reply);
  // A step that began while another was in flight is timed from the end of that one.
  const auto now = std::chrono::steady_clock::now();
  const auto before = std::exchange(last_finish_, now);
  const auto begun = std::max(step.begun, before);
  reply.set_step_s(std::chrono::duration<double>(now - begun).count());
  gap_s_ = std::chrono::duration<double>(begun - before).count();
  return reply;
}

absl::Status Engine::CarryOut(const v1::StepPlan& plan, EngineStep& step) {
  KVASIR_RETURN_IF_ERROR(CheckPlan(plan));
  last_plan_ = plan.step();
  step.reply.Clear();
  step.reply.set_group_epoch(plan.group_epoch());
  step.reply.set_step(plan.step());
  KVASIR_RETURN_IF_ERROR(CarryOutBlocks(plan));
  step.rows.clear();
  step.works.clear();
  KVASIR_ASSIGN_OR_RETURN(const bool missing, AnyRankMisses(plan, step.reply));
  std::vector<Truncation> truncations;
  if (!missing) {
    KVASIR_RETURN_IF_ERROR(StartSequences(plan));
    KVASIR_RETURN_IF_ERROR(PrepareRows(plan, step, truncations));
  }
  step.batch = MakeStepBatch(step.works, selectors_.all(), std::move(truncations), windows_);
  step.meter.BeginStep(step.batch);
  return step.works.empty() ? absl::OkStatus() : Compute(step);
}

absl::Status Engine::CheckPlan(const v1::StepPlan& plan) const {
  if (plan.group_epoch() != options_.group_epoch) {
    return absl::FailedPreconditionError(absl::StrCat("a plan of group epoch ", plan.group_epoch(),
                                                      ", this group's is ", options_.group_epoch));
  }
  if (plan.step() <= last_plan_) {
    return absl::FailedPreconditionError(
        absl::StrCat("plan ", plan.step(), " after plan ", last_plan_));
  }
  std::set<uint32_t> slots;
  int64_t tokens = 0;
  for (const v1::StepRow& row : plan.rows()) {
    tokens += row.num_tokens();
    if (!slots.insert(row.slot()).second) {
      return absl::InternalError(absl::StrCat("wrong plan: two rows of slot ", row.slot()));
    }
  }
  if (tokens > options_.max_num_batched_tokens) {
    return absl::InternalError(absl::StrCat("wrong plan: ", tokens, " tokens, the step holds ",
                                            options_.max_num_batched_tokens));
  }
  return absl::OkStatus();  // rows are at most one per slot, so at most max_num_seqs
}

absl::StatusOr<bool> Engine::AnyRankMisses(const v1::StepPlan& plan, v1::StepReply& reply) {
  for (const kernels::BlockId id : slots_->FindMissing(plan)) {
    reply.add_missing_blocks(static_cast<uint64_t>(id.value));
  }
  const bool reuses = std::any_of(plan.starts().begin(), plan.starts().end(),
                                  [](const auto& start) { return start.cached_blocks_size() > 0; });
  float misses = static_cast<float>(reply.missing_blocks_size());
  if (reuses) KVASIR_RETURN_IF_ERROR(collective_.AllReduceSum(absl::MakeSpan(&misses, 1)));
  return misses > 0;
}

absl::Status Engine::StartSequences(const v1::StepPlan& plan) {
  for (const v1::SequenceStart& start : plan.starts()) {
    KVASIR_ASSIGN_OR_RETURN(started_[start.slot()], slots_->Start(start));
  }
  return absl::OkStatus();
}

absl::Status Engine::PrepareRows(const v1::StepPlan& plan, EngineStep& step,
                                 std::vector<Truncation>& truncations) {
  for (const v1::StepRow& plan_row : plan.rows()) {
    EngineRow row = {.slot = plan_row.slot()};
    if (const auto started = started_.extract(row.slot)) row.cached = started.mapped();
    if (slots_->IsLeftOut(plan_row.slot())) {
      step.rows.push_back(std::move(row));
      continue;
    }
    absl::StatusOr<RowWork> work = slots_->Prepare(plan_row, truncations);
    if (work.ok()) {
      RememberSelections(slots_->at(row.slot), work->begin + work->num_tokens);
      row.computed = std::ssize(step.works);
      work->fed_by = FedBy(*work);
      step.works.push_back(*work);
    } else if (absl::IsResourceExhausted(work.status())) {
      // Stores of equal size fill up equally, so all ranks leave out this row and later ones.
      slots_->at(row.slot).failed = work.status();
      slots_->at(row.slot).is_left_out = true;
    } else {
      return work.status();
    }
    step.rows.push_back(std::move(row));
  }
  return absl::OkStatus();
}

// An unknown token is the last of those that the step in flight samples for its slot.
int64_t Engine::FedBy(const RowWork& work) const {
  if (work.sequence->tokens[static_cast<size_t>(work.begin)] != kTokenToCome) return -1;
  const EngineStep& before = steps_[finished_ % kMostSteps];
  const std::vector<int64_t>& rows = before.batch.sampled_rows;
  const auto of_slot = std::find_if(rows.begin(), rows.end(), [&](int64_t row) {
    return before.works[static_cast<size_t>(row)].slot == work.slot;
  });
  KVASIR_CHECK(begun_ > finished_ && of_slot != rows.end());
  return of_slot - rows.begin();
}

bool Engine::Remembers(const Sequence& sequence) const {
  return selectors_.at(sequence.decode.selector).reuse != nullptr;
}

// One rank may have no room where others do. Then the sequence fails, and is still computed without
// memory.
void Engine::RememberSelections(Sequence& sequence, int64_t end) const {
  if (!Remembers(sequence) || sequence.memory != nullptr || end <= sequence.prompt_size) return;
  const ServedSelector& served = selectors_.at(sequence.decode.selector);
  const ShardPlan& shard = model_.options().shard;
  const int64_t group = shard.query_heads.size() * shard.kv_replicas / shard.kv_heads.size();
  kernels::PolicyNumbers largest = sequence.decode.numbers;
  for (const LayerBudget& layers : sequence.decode.layer_budgets) {
    largest.budget_tokens = std::max(largest.budget_tokens, layers.budget_tokens);
  }
  absl::StatusOr<std::unique_ptr<kernels::RememberedSelections>> memory =
      model_.backend().Remember({.selector = *served.selector,
                                 .rule = *served.reuse,
                                 .layout = layout_,
                                 .group = group,
                                 .numbers = largest,
                                 .tokens = model_.options().max_model_len});
  if (memory.ok()) {
    sequence.memory = *std::move(memory);
  } else if (sequence.failed.ok()) {
    sequence.failed = memory.status();
  }
}

absl::Status Engine::Compute(EngineStep& step) {
  // Before options refer to the tokens, because this may move them.
  for (const RowWork& work : step.works) {
    if (work.sample) slots_->at(work.slot).tokens.push_back(kTokenToCome);
  }
  AskForTokens(step);
  KVASIR_ASSIGN_OR_RETURN(const kernels::PagedKv kv, store_->BeginStep(++kv_step_));
  KVASIR_RETURN_IF_ERROR(model_.Forward({.batch = step.batch,
                                         .kv = kv,
                                         .activations = activations_,
                                         .meter = step.meter,
                                         .collective = collective_}));
  KVASIR_RETURN_IF_ERROR(store_->EndStep());
  for (const RowWork& work : step.works) {
    slots_->at(work.slot).kv_length = work.begin + work.num_tokens;
  }
  return absl::OkStatus();
}

void Engine::AskForTokens(EngineStep& step) {
  StepBatch& batch = step.batch;
  const size_t count = batch.sampled_rows.size();
  const int64_t vocab = model_.options().config.vocab_size;
  step.sampling_buffers.assign(count, {});
  for (size_t i = 0; i < count; ++i) {
    const RowWork& work = step.works[static_cast<size_t>(batch.sampled_rows[i])];
    batch.sampling.push_back(MakeSamplingOptions(*work.sequence, work.begin + work.num_tokens,
                                                 vocab, step.sampling_buffers[i]));
  }
  batch.keeps_logits = logits_tap_ != nullptr;
  if (batch.is_fed()) ++fed_steps_;
  AskForScores(step.works, vocab, step.score_tops, batch.scoring);
}

absl::Status Engine::Collect(EngineStep& step) {
  if (step.works.empty()) return absl::OkStatus();
  StepResult result;
  KVASIR_RETURN_IF_ERROR(model_.backend().Collect(result));
  for (size_t r = 0; r < step.works.size(); ++r) {
    const RowWork& work = step.works[r];
    step.RowOf(r).waits = store_->TakeWaits(work.slot);
    Sequence& sequence = slots_->at(work.slot);
    if (result.row_is_finite[r] == 0 && sequence.failed.ok()) {
      sequence.failed = absl::DataLossError(
          "NaN or infinity in the hidden state: weights or KV are corrupt, or KV was absent");
    }
    if (sequence.failed.ok()) sequence.sound_length = work.begin + work.num_tokens;
  }
  TakeScores(result.scores, model_.options().config.vocab_size,
             model_.options().shard.rank == 0 ? Answers::kAll : Answers::kNoScores, *slots_, step);
  TakeTokens(step, result);
  FailCorruptSequences();
  return absl::OkStatus();
}

void Engine::TakeTokens(EngineStep& step, const StepResult& result) {
  for (size_t i = 0; i < step.batch.sampled_rows.size(); ++i) {
    const int64_t row = step.batch.sampled_rows[i];
    const RowWork& work = step.works[static_cast<size_t>(row)];
    const int64_t position = work.begin + work.num_tokens;
    if (logits_tap_) {
      const int64_t vocab = result.logits.dim(1);
      const float* logits = result.logits.As<float>() + static_cast<int64_t>(i) * vocab;
      logits_tap_(work.slot, position - 1, {logits, static_cast<size_t>(vocab)});
    }
    const kernels::SampledToken& token = result.tokens[i];
    Sequence& sequence = slots_->at(work.slot);
    sequence.tokens[static_cast<size_t>(position)] =
        token.status.ok() ? token.token : kTokenOfFailure;
    if (!token.status.ok()) {
      if (sequence.failed.ok()) sequence.failed = token.status;
      continue;
    }
    EngineRow& answered = step.RowOf(static_cast<size_t>(row));
    answered.token = token.token;
    if (sequence.sampling.has_logprobs()) {
      answered.logprobs = Logprobs(token, step.sampling_buffers[i]);
    }
  }
}

// Only one rank finds a corruption. Its sequences fail here and are still computed with the others,
// so that the ranks stay in step until the coordinator removes them.
void Engine::FailCorruptSequences() {
  for (const kvstore::CorruptBlock& corrupt : store_->TakeCorrupt()) {
    for (const int64_t slot : corrupt.slots) {
      Sequence& sequence = slots_->at(slot);
      if (sequence.failed.ok()) sequence.failed = corrupt.status;
    }
  }
}

// ---- the tier below

void Engine::FillReply(const EngineStep& step, v1::StepReply& reply) const {
  FillResults(step, *slots_, reply);
  *reply.mutable_tiers() = UsageOf(store_->stats());
}

}  // namespace kvasir::worker
