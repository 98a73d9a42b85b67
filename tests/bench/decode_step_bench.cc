// Speed of whole decode steps of the worker's engine: one process, no coordinator, a model that is
// only a shape (random weights), and a context that is filled with random keys and values. Prints a
// row for each context and policy, dense first:
//
//   decode_step_bench [--model=FOLDER] [--device=cuda] [--contexts=4096,131072] [--policies=...]
//                     [--batch=1] [--steps=64] [--budget=2048] [--window=1024] [--ranks=1]
//                     [--device-share=1] [--turn=0] [--kv-cache-dtype=bfloat16] [--trace=STEPS]
//
// With several ranks, a process and a GPU each, rank 0 is printed. With --trace, the kernels of so
// many more steps follow each row (device_trace.h). With a --device-share below 1, that share of
// the longest context's KV fits into device memory, and the rest is read from the host tier. --turn
// is about the cosine of consecutive queries (turning_queries.h); with 0, layers use the queries of
// the random model.
//
// A policy is `all` or the name of a selector, followed by +top_p (0.95), +interval (8) and +layer
// (one selection a layer); its sink is 128 tokens. quest+bound ranks pages by their bounds
// (docs/decisions/0012), infinitehip has the preset 3k and infinitehip+5k the other.
//
//   wall       time of Engine::Step with sampling and tables: median and mean over the steps
//   GPU        time from the begin to the end of the step's graph, likewise
//   host       medians in microseconds: from the plan until the step's tables are being copied; for
//              launching the graph, waiting and fetching, beyond the GPU's time; the rest until
//              the reply
//   overlap    share of pages selected in the step before too, when queries turn
//   misses     share of the pages read that are in the host tier; promoted: copied from it per step
//   read       bytes that a step must read: weights, attended keys and values, digests when it
//              selects
//   roofline   the time in which the GPU reads that many bytes (device_read_speed.h, measured at
//              the start and printed in the first line) as a share of the GPU's time; not on a CPU
//   nodes      number of nodes of the graph, and per layer
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "tests/bench/decode_step_flags.h"
#include "tests/bench/decode_step_measured.h"
#include "tests/bench/device_read_speed.h"
#include "tests/bench/device_trace.h"
#include "tests/bench/synthetic_kv.h"
#include "tests/bench/turning_queries.h"
#include "tests/worker/parallel/rank_processes.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/engine/engine.h"
#include "worker/loaded_model.h"
#include "worker/make_backend.h"
#include "worker/parallel/gloo_collective.h"
#include "worker/parallel/single_collective.h"
#include "worker/thread_pool.h"

namespace kvasir::worker {
namespace {

using kernels::kPageTokens;
using Clock = std::chrono::steady_clock;

constexpr int64_t kWarmUps = 10;
constexpr int64_t kFillTokens = 8192;                                  // per step
constexpr int64_t kLeastDeviceBlocks = 2 * kFillTokens / kPageTokens;  // for two filling steps
constexpr int64_t kLookEvery = 64;  // steps between looks at two consecutive ones
constexpr uint64_t kEpoch = 1;

v1::RowSampling Greedy() {
  v1::RowSampling sampling;
  sampling.set_top_p(1);
  sampling.set_repetition_penalty(1);
  return sampling;
}

double Microseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

class Bench {
 public:
  // `rendezvous` is with the other ranks; null for a single rank.
  Bench(const Flags& flags, int rank, Rendezvous* rendezvous);
  void Run();

 private:
  void FillContexts();
  void AddSeals(v1::StepPlan& plan);
  void MakeQueries();
  Measured Measure(int64_t context, uint32_t policy);
  // Runs a step of the plan, and returns its time in milliseconds.
  double Step(v1::StepPlan& plan, v1::StepReply& reply);
  void AddStart(int64_t context, uint32_t policy, int64_t row, v1::StepPlan& plan);
  // Adds one token at `position` of each measured sequence.
  void AddRows(int64_t position, v1::StepPlan& plan);
  double WeightBytes() const;
  double BytesRead(const std::string& policy, int64_t context, const Measured& measured) const;
  void Trace(int64_t position);
  void Leave();
  void PrintHead(double fill_s) const;
  void Print(int64_t context, const std::string& policy, const Measured& measured,
             double dense_ms) const;

  const Flags flags_;
  const int rank_;
  const double read_speed_;  // of the GPU, bytes per second; 0 on a CPU
  ThreadPool executor_;
  std::unique_ptr<Backend> backend_;
  SyntheticKvBackend filler_;
  std::optional<TurningQueries> queries_;
  LoadedModel model_;
  std::unique_ptr<Collective> collective_;
  std::unique_ptr<Engine> engine_;
  uint64_t step_ = 0;
  Clock::time_point began_, over_;  // of the last step
  uint64_t next_block_ = 1;
  uint64_t sealed_blocks_ = 0;
  uint64_t next_sequence_ = 1;
  std::vector<std::vector<uint64_t>> blocks_;  // of the filled sequences
};

LoadedModel Load(const Flags& flags, int rank, Backend& backend) {
  LoadModelOptions options;
  options.rank = rank;
  options.num_ranks = flags.ranks;
  options.model.set_model(flags.model);
  options.model.set_load_format("dummy");
  options.model.set_dtype("bfloat16");
  options.model.set_max_model_len(static_cast<uint32_t>(flags.contexts.back() + 4096));
  options.model.set_allow_long_max_model_len(true);
  options.progress = [](absl::string_view, double) {};
  return Value(LoadModel(options, backend));
}

std::unique_ptr<Collective> Connect(const Flags& flags, int rank, Rendezvous* rendezvous) {
  if (rendezvous == nullptr) return std::make_unique<SingleCollective>();
  return Value(GlooCollective::Connect(
      {.rank = rank, .size = static_cast<int>(flags.ranks), .timeout = absl::Seconds(20)},
      *rendezvous));
}

Bench::Bench(const Flags& flags, int rank, Rendezvous* rendezvous)
    : flags_(flags),
      rank_(rank),
      read_speed_(flags.device == "cuda" ? kernels::DeviceReadBytesPerSecond() : 0),
      executor_(8),
      backend_(Value(MakeBackend(flags.device, executor_))),
      filler_(*backend_),
      model_(Load(flags, rank, filler_)),
      collective_(Connect(flags, rank, rendezvous)) {
  Check(backend_->JoinRanks(*collective_));
  EngineOptions options = {.group_epoch = kEpoch,
                           .max_num_seqs = 2 * flags.batch,
                           .max_num_batched_tokens = std::max(kFillTokens, flags.batch),
                           .kv_dtype = flags.kv_cache_dtype,
                           .policies = {}};
  for (const std::string& policy : flags.policies) {
    options.policies.push_back(MakePolicy(policy, flags));
  }
  const kernels::KvLayout layout = model_.transformer->kv_layout(options.kv_dtype);
  const int64_t blocks_a_row = flags.contexts.back() / kPageTokens + 16 + flags.steps / kPageTokens;
  // Extents of the host tier have bounds, codes and checksums besides the pages.
  const int64_t host_block = layout.block_bytes() + layout.block_bounds_bytes() +
                             layout.block_key_codes_bytes() + 16 * layout.pages_per_block() + 8192;
  options.kv.host = flags.batch * blocks_a_row * host_block;
  const int64_t blocks = flags.batch * blocks_a_row + 32;
  options.kv.device =
      std::max(static_cast<int64_t>(flags.device_share * static_cast<double>(blocks)),
               kLeastDeviceBlocks) *
      layout.block_bytes();
  engine_ = Value(Engine::Create(options, *model_.transformer, *collective_));
}

double Bench::Step(v1::StepPlan& plan, v1::StepReply& reply) {
  plan.set_group_epoch(kEpoch);
  plan.set_step(++step_);
  began_ = Clock::now();
  reply = Value(engine_->Step(plan));
  over_ = Clock::now();
  for (const v1::RowResult& row : reply.results()) {
    if (row.error_code() != 0) Check(absl::InternalError(row.error_message()));
  }
  return Microseconds(began_, over_) / 1000;
}

// Fills one sequence per row, in slots [batch, 2 batch). It keeps its blocks for the measured ones.
void Bench::FillContexts() {
  const int64_t tokens = flags_.contexts.back();
  filler_.set_filling(true);
  for (int64_t row = 0; row < flags_.batch; ++row) {
    const auto slot = static_cast<uint32_t>(flags_.batch + row);
    blocks_.emplace_back();
    for (int64_t begin = 0; begin < tokens; begin += kFillTokens) {
      v1::StepPlan plan;
      AddSeals(plan);
      if (begin == 0) {
        v1::SequenceStart& start = *plan.add_starts();
        start.set_slot(slot);
        start.set_sequence_id(next_sequence_++);
        start.mutable_tokens()->Resize(static_cast<int>(tokens), 1);
        start.set_num_prompt_tokens(static_cast<uint32_t>(tokens));
        *start.mutable_sampling() = Greedy();
        start.mutable_prefill()->set_window_tokens(1);
        start.mutable_decode()->set_window_tokens(1);
      }
      const int64_t end = std::min(begin + kFillTokens, tokens);
      v1::StepRow& to = *plan.add_rows();
      to.set_slot(slot);
      to.set_begin(static_cast<uint32_t>(begin));
      to.set_num_tokens(static_cast<uint32_t>(end - begin));
      for (int64_t block = begin / kPageTokens; block < end / kPageTokens; ++block) {
        blocks_.back().push_back(next_block_);
        to.add_new_blocks(next_block_++);
      }
      v1::StepReply reply;
      Step(plan, reply);
    }
  }
  filler_.set_filling(false);
  v1::StepPlan plan;
  AddSeals(plan);
  v1::StepReply reply;
  Step(plan, reply);
}

// Adds seals of all filled blocks that are not sealed yet.
void Bench::AddSeals(v1::StepPlan& plan) {
  for (; sealed_blocks_ + 1 < next_block_; ++sealed_blocks_) {
    v1::BlockSeal& seal = *plan.add_seals();
    seal.set_block_id(sealed_blocks_ + 1);
    std::string hash(32, '\0');
    std::memcpy(hash.data(), &sealed_blocks_, sizeof(sealed_blocks_));
    seal.set_prefix_hash(hash);
  }
}

void Bench::AddStart(int64_t context, uint32_t policy, int64_t row, v1::StepPlan& plan) {
  v1::SequenceStart& start = *plan.add_starts();
  start.set_slot(static_cast<uint32_t>(row));
  start.set_sequence_id(next_sequence_++);
  start.mutable_tokens()->Resize(static_cast<int>(context + 1), static_cast<uint32_t>(row + 1));
  start.set_num_prompt_tokens(static_cast<uint32_t>(context + 1));
  const auto& blocks = blocks_[static_cast<size_t>(row)];
  start.mutable_cached_blocks()->Add(blocks.begin(), blocks.begin() + context / kPageTokens);
  *start.mutable_sampling() = Greedy();
  start.set_policy_index(policy);
  const v1::SparsityPolicy numbers = MakePolicy(flags_.policies[policy], flags_);
  *start.mutable_prefill() = numbers.prefill();
  *start.mutable_decode() = numbers.decode();
  start.set_tail_tokens(kPageTokens);
}

void Bench::AddRows(int64_t position, v1::StepPlan& plan) {
  for (int64_t row = 0; row < flags_.batch; ++row) {
    v1::StepRow& to = *plan.add_rows();
    to.set_slot(static_cast<uint32_t>(row));
    to.set_begin(static_cast<uint32_t>(position));
    to.set_num_tokens(1);
    to.set_sample(true);
    if (position % kPageTokens == 0) to.add_new_blocks(next_block_++);
  }
}

void Bench::MakeQueries() {
  const TransformerOptions& model = model_.transformer->options();
  const TurningQueries::Shape shape = {.num_layers = model.config.num_layers,
                                       .sequences = flags_.batch,
                                       .heads = model.shard.query_heads.size(),
                                       .head_dim = model.config.head_dim};
  queries_ = Value(TurningQueries::Create(shape, flags_.turn, kWarmUps + flags_.steps, *backend_));
  filler_.set_queries(queries_->layers());
}

Measured Bench::Measure(int64_t context, uint32_t policy) {
  const auto* gpu = dynamic_cast<const CudaBackend*>(backend_.get());
  Measured measured;
  SelectionOverlap overlap;
  if (queries_.has_value()) queries_->Restart();
  kvstore::KvStoreStats before;
  for (int64_t i = 0; i < kWarmUps + flags_.steps; ++i) {
    v1::StepPlan plan;
    for (int64_t row = 0; row < flags_.batch && i == 0; ++row) AddStart(context, policy, row, plan);
    AddRows(context + i, plan);
    v1::StepReply reply;
    if (queries_.has_value()) Check(queries_->Turn());
    if (i == kWarmUps) before = engine_->store().stats();
    const double ms = Step(plan, reply);
    if (i < kWarmUps) continue;
    if (queries_.has_value() && i % kLookEvery < 2) {
      Check(overlap.Look(filler_.kv(), queries_->device()));
    }
    measured.wall_ms.push_back(ms);
    const SyntheticKvBackend::StepTimes& host = filler_.times();
    measured.before_us.push_back(Microseconds(began_, host.begun));
    measured.around_us.push_back(Microseconds(host.ending, host.ended));
    measured.behind_us.push_back(Microseconds(host.ended, over_));
    for (const v1::RowResult& row : reply.results()) measured.Add(row.accounting());
    if (gpu == nullptr) continue;
    measured.gpu_ms.push_back(Value(gpu->graphs().LaunchMilliseconds()));
    measured.around_us.back() -= 1000 * measured.gpu_ms.back();
    measured.nodes = gpu->graphs().stats().nodes;
  }
  const kvstore::KvStoreStats after = engine_->store().stats();
  measured.hits = after.device_hits - before.device_hits;
  measured.misses = after.device_misses - before.device_misses;
  measured.promoted_bytes = after.bytes_host_to_device - before.bytes_host_to_device;
  measured.overlap = overlap.share();
  return measured;
}

void Bench::Trace(int64_t position) {
  tests::BeginDeviceTrace();
  for (int64_t i = 0; i < flags_.trace; ++i) {
    v1::StepPlan plan;
    AddRows(position + i, plan);
    v1::StepReply reply;
    Step(plan, reply);
  }
  const tests::DeviceWork work = tests::EndDeviceTrace();
  if (rank_ == 0) tests::PrintDeviceWork(work);
}

void Bench::Leave() {
  v1::StepPlan leave;
  for (int64_t row = 0; row < flags_.batch; ++row) leave.add_free_slots(static_cast<uint32_t>(row));
  v1::StepReply reply;
  Step(leave, reply);
}

double Bench::WeightBytes() const {
  const ModelConfig& c = model_.transformer->options().config;
  const int64_t query = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const int64_t layer = c.hidden_size * (2 * query + 2 * kv + 3 * c.intermediate_size);
  return 2.0 *
         static_cast<double>((c.num_layers * layer + c.vocab_size * c.hidden_size) / flags_.ranks);
}

// Returns the bytes that a step reads. Selectors count as reading the digests of the whole context:
// bounds, or keys for tokenselect. A pruner reads the codes of the selected tokens.
double Bench::BytesRead(const std::string& policy, int64_t context,
                        const Measured& measured) const {
  const kernels::KvLayout layout = model_.transformer->kv_layout(flags_.kv_cache_dtype);
  const auto per_step = [&](int64_t count) {
    return static_cast<double>(count) / static_cast<double>(flags_.steps);
  };
  const double pages = static_cast<double>(context / kPageTokens);
  const auto codes = static_cast<double>(layout.page_key_codes_bytes());
  double bytes = WeightBytes() +
                 per_step(measured.attended_tokens) * static_cast<double>(layout.token_bytes());
  if (absl::StartsWith(policy, "all")) return bytes;
  // For infinitehip only its first stage: the codes that later stages read are not counted.
  const int64_t judged = absl::StartsWith(policy, "tokenselect") ? layout.page_bytes() / 2
                                                                 : layout.page_bounds_bytes();
  bytes += per_step(measured.selected) * pages * static_cast<double>(judged);
  if (absl::StrContains(policy, "+top_p")) {
    const double rows = static_cast<double>(flags_.batch * layout.pages_per_block());
    bytes += rows * static_cast<double>(flags_.budget) / kPageTokens * codes;
  }
  return bytes;
}

void Bench::Print(int64_t context, const std::string& policy, const Measured& measured,
                  double dense_ms) const {
  if (rank_ != 0) return;
  const int64_t layers = model_.transformer->options().config.num_layers;
  const double bytes = BytesRead(policy, context, measured);
  const double rows =
      static_cast<double>(flags_.steps * flags_.batch *
                          model_.transformer->kv_layout(flags_.kv_cache_dtype).pages_per_block());
  const double wall = Mean(measured.wall_ms);
  const double gpu = measured.gpu_ms.empty() ? wall : Mean(measured.gpu_ms);
  std::printf(
      "| %lld | %s | %.0f | %.1f %% | %.3f | %.2f %% | %.1f | %.3f | %.3f | %.3f | %.3f | "
      "%.0f + %.0f + %.0f | %.2f | %.3f | %lld | %.1f | **%.2f** |\n",
      static_cast<long long>(context), policy.c_str(),
      static_cast<double>(measured.attended_tokens) / rows,
      100 * static_cast<double>(measured.selected) / rows, measured.overlap,
      100 * static_cast<double>(measured.misses) /
          static_cast<double>(std::max<int64_t>(1, measured.hits + measured.misses)),
      static_cast<double>(measured.promoted_bytes) / static_cast<double>(flags_.steps) / 1e6,
      Median(measured.wall_ms), wall, measured.gpu_ms.empty() ? 0 : Median(measured.gpu_ms),
      measured.gpu_ms.empty() ? 0 : gpu, Median(measured.before_us), Median(measured.around_us),
      Median(measured.behind_us), bytes / 1e9,
      read_speed_ > 0 ? bytes / read_speed_ * 1000 / gpu : 0,
      static_cast<long long>(measured.nodes),
      static_cast<double>(measured.nodes) / static_cast<double>(layers), dense_ms / gpu);
  std::fflush(stdout);
}

void Bench::Run() {
  const auto begin = Clock::now();
  if (flags_.turn > 0) MakeQueries();
  FillContexts();
  if (rank_ == 0) PrintHead(std::chrono::duration<double>(Clock::now() - begin).count());
  for (const int64_t context : flags_.contexts) {
    double dense_ms = 0;
    for (size_t policy = 0; policy < flags_.policies.size(); ++policy) {
      const Measured measured = Measure(context, static_cast<uint32_t>(policy));
      if (policy == 0)
        dense_ms = Mean(measured.gpu_ms.empty() ? measured.wall_ms : measured.gpu_ms);
      Print(context, flags_.policies[policy], measured, dense_ms);
      if (flags_.trace > 0) Trace(context + kWarmUps + flags_.steps);
      Leave();
    }
  }
}

void Bench::PrintHead(double fill_s) const {
  std::printf("%s on %s, %lld ranks, %lld sequences; contexts of %lld tokens filled in %.1f s",
              flags_.model.c_str(), backend_->name().c_str(), static_cast<long long>(flags_.ranks),
              static_cast<long long>(flags_.batch), static_cast<long long>(flags_.contexts.back()),
              fill_s);
  if (read_speed_ > 0) std::printf("; the GPU reads %.2f TB/s", read_speed_ / 1e12);
  std::printf("\n\n");
  std::printf(
      "| context | policy | tokens a row | selects | overlap | misses | promoted, MB | wall, ms | "
      "mean | GPU, ms | mean | host, us | read, GB | roofline | nodes | a layer | times as fast as "
      "the first |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  using namespace kvasir::worker;
  const Flags flags = ParseFlags(argc, argv);
  if (flags.ranks == 1) {
    Bench(flags, 0, nullptr).Run();
    return 0;
  }
  const auto run = [&flags](int rank, Rendezvous& rendezvous) {
    if (cudaSetDevice(rank) != cudaSuccess) return 1;
    Bench(flags, rank, &rendezvous).Run();
    return 0;
  };
  const std::vector<int> statuses = RunRankProcesses(static_cast<int>(flags.ranks), run);
  return *std::max_element(statuses.begin(), statuses.end()) == 0 ? 0 : 1;
}
