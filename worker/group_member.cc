#include "worker/group_member.h"

#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "proto/worker_protocol.h"
#include "worker/disk.h"
#include "worker/parallel/gloo_collective.h"
#include "worker/parallel/single_collective.h"
#include "worker/peers/peer_tier.h"

namespace kvasir::worker {
namespace {

// Limits of the memory that a plan may ask for; config.proto gives the same to the user's flags.
constexpr uint32_t kMaxSeqs = 1024;
constexpr uint32_t kMaxBatchedTokens = 1 << 20;
constexpr int kMaxPolicies = 4;
constexpr double kMaxGb = 100'000;
constexpr double kMaxDiskGb = 1'000'000;
// Time between two polls of a busy tier while there are no plans.
constexpr absl::Duration kTierPoll = absl::Milliseconds(1);
// Time between two polls of a device that is in a step, while no plan follows it, and the most
// polls: the next plan is usually sent at once.
constexpr absl::Duration kDevicePoll = absl::Microseconds(50);
constexpr int64_t kMostDevicePolls = 200;

absl::Status CheckShardPlan(const v1::ShardPlan& plan) {
  const auto bad = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("shard plan: ", what...));
  };
  const auto gb_in_range = [](double gb) { return gb >= 0 && gb <= kMaxGb; };
  if (plan.protocol_version() != proto::kWorkerProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the coordinator speaks version ", plan.protocol_version(), " of the worker protocol, ",
        "this worker ", proto::kWorkerProtocolVersion, "; run the same release on both"));
  }
  if (plan.tensor_parallel_rank() >= plan.tensor_parallel_size()) {
    return bad("rank ", plan.tensor_parallel_rank(), " of ", plan.tensor_parallel_size());
  }
  if (plan.max_num_seqs() == 0 || plan.max_num_seqs() > kMaxSeqs) {
    return bad("max_num_seqs ", plan.max_num_seqs(), "; it must be 1 to ", kMaxSeqs);
  }
  if (plan.max_num_batched_tokens() == 0 || plan.max_num_batched_tokens() > kMaxBatchedTokens) {
    return bad("max_num_batched_tokens ", plan.max_num_batched_tokens(), "; it must be 1 to ",
               kMaxBatchedTokens);
  }
  if (plan.policies_size() == 0 || plan.policies_size() > kMaxPolicies) {
    return bad(plan.policies_size(), " policies; there must be 1 to ", kMaxPolicies);
  }
  if (!gb_in_range(plan.kv().kv_device_size_gb()) || !gb_in_range(plan.kv().kv_host_size_gb())) {
    return bad("KV tiers of ", plan.kv().kv_device_size_gb(), " and ", plan.kv().kv_host_size_gb(),
               " GB");
  }
  if (!plan.kv().kv_disk_path().empty() &&
      !(plan.kv().kv_disk_size_gb() > 0 && plan.kv().kv_disk_size_gb() <= kMaxDiskGb)) {
    return bad("a disk tier of ", plan.kv().kv_disk_size_gb(), " GB");
  }
  const double on_demand_gb = plan.kv().kv_on_demand_size_gb();
  if (!(on_demand_gb >= 0 && on_demand_gb <= kMaxDiskGb)) {
    return bad("kv_on_demand_size_gb ", on_demand_gb);
  }
  if (on_demand_gb > 0 && plan.kv().kv_disk_path().empty()) {
    return bad("kv_on_demand_size_gb ", on_demand_gb, " without kv_disk_path");
  }
  if (on_demand_gb > plan.kv().kv_disk_size_gb()) {
    return bad("kv_on_demand_size_gb ", on_demand_gb, " on a disk tier of ",
               plan.kv().kv_disk_size_gb(), " GB; raise kv_disk_size_gb");
  }
  if (!(plan.mass_sample_rate() >= 0 && plan.mass_sample_rate() <= 1)) {
    return bad("mass_sample_rate ", plan.mass_sample_rate());
  }
  if (plan.ranks_on_machine() == 0 || plan.ranks_on_machine() > plan.tensor_parallel_size()) {
    return bad("ranks_on_machine ", plan.ranks_on_machine(), " of ", plan.tensor_parallel_size());
  }
  const double utilization = plan.kv().gpu_memory_utilization();
  if (!(utilization > 0 && utilization <= 1)) return bad("gpu_memory_utilization ", utilization);
  if (!(plan.collective_timeout_s() > 0 && plan.collective_timeout_s() < 1e6)) {
    return bad("collective_timeout_s ", plan.collective_timeout_s());
  }
  return absl::OkStatus();
}

// Returns everything in a plan that the loaded model depends on.
std::string ModelKey(const v1::ShardPlan& plan) {
  const v1::ModelConfig& model = plan.model();
  return absl::StrCat(model.model(), "\n", model.dtype(), "\n", model.max_model_len(),
                      model.allow_long_max_model_len() ? " allowed" : "", "\n",
                      model.position_extension(), "/", model.self_extend_group_size(), "/",
                      model.self_extend_window(), "\n", model.load_format(), "\n",
                      model.weights_dtype(), "\n", plan.kv().kv_cache_dtype(), "\n",
                      plan.tensor_parallel_rank(), "/", plan.tensor_parallel_size());
}

// Reasons that a higher rate would not remove come first.
v1::MassUnmeasured WhyUnmeasured(const v1::ShardPlan& plan, const Transformer& model) {
  if (!model.backend().MeasuresMass()) return v1::MASS_UNMEASURED_GPU;
  if (model.options().extension == PositionExtension::kStreaming) {
    return v1::MASS_UNMEASURED_COMPACT_POSITIONS;
  }
  if (plan.kv().kv_on_demand_size_gb() > 0) return v1::MASS_UNMEASURED_ON_DEMAND;
  return plan.mass_sample_rate() > 0 ? v1::MASS_UNMEASURED_UNSPECIFIED : v1::MASS_UNMEASURED_OFF;
}

int64_t GbToBytes(double gb) { return static_cast<int64_t>(gb * 1e9); }

std::vector<std::string> NamesOf(
    const google::protobuf::RepeatedPtrField<v1::SparsityPolicy>& policies) {
  std::vector<std::string> names;
  for (const v1::SparsityPolicy& policy : policies) names.push_back(policy.name());
  return names;
}

}  // namespace

GroupMember::GroupMember(GroupMemberOptions options, Backend& backend, WorkerMetrics& metrics)
    : options_(std::move(options)),
      backend_(backend),
      metrics_(metrics),
      process_times_(options_.process_times) {
  process_times_->Enter("waiting for a coordinator");
}

absl::Status GroupMember::Serve(CoordinatorStream& stream) {
  const std::optional<v1::CoordinatorMessage> first = stream.Read();
  if (!first) return absl::OkStatus();
  if (!first->has_shard_plan()) {
    return absl::FailedPreconditionError("the first message of a stream must be a ShardPlan");
  }
  const v1::ShardPlan& plan = first->shard_plan();
  KVASIR_RETURN_IF_ERROR(CheckShardPlan(plan));
  options_.on_rank(plan.tensor_parallel_rank());
  StartTimes times =
      std::exchange(process_times_, std::nullopt).value_or(StartTimes(StartTimes::Clock::now()));
  const Progress progress = [&](absl::string_view stage, double fraction) {
    times.Enter(stage);
    v1::WorkerMessage message;
    message.mutable_load_progress()->set_stage(std::string(stage));
    message.mutable_load_progress()->set_fraction(fraction);
    stream.Write(std::move(message));
  };
  KVASIR_RETURN_IF_ERROR(Load(plan, progress));
  times.SetBytes("loading weights", model_->weight_bytes);
  progress("joining the other ranks", 0);
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<Collective> collective, Connect(plan, stream));
  // Done now, while all ranks are here: the time until an engine has taken its memory differs.
  KVASIR_RETURN_IF_ERROR(backend_.JoinRanks(*collective));
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          MakeEngine(plan, *collective, progress));
  metrics_.JoinGroup({.model_name = plan.served_model_name(),
                      .rank = plan.tensor_parallel_rank(),
                      .disk_tier = !plan.kv().kv_disk_path().empty(),
                      .policies = NamesOf(plan.policies())});
  metrics_.RecordTiers(*engine);
  for (v1::TierReport& report : engine->Inventory()) {
    v1::WorkerMessage message;
    *message.mutable_tier_report() = std::move(report);
    stream.Write(std::move(message));
  }
  stream.Write(MakeReady(plan, *engine));
  spdlog::info("rank {} of {}, epoch {}: ready after {}", plan.tensor_parallel_rank(),
               plan.tensor_parallel_size(), plan.group_epoch(), times.Summary());
  options_.on_ready(true);
  const absl::Status status = RunPlans(*engine, stream);
  options_.on_ready(false);
  backend_.LeaveRanks();
  if (!status.ok()) stream.Fail(status);
  engine->FlushTier();
  return status;
}

absl::Status GroupMember::Load(const v1::ShardPlan& plan, const Progress& progress) {
  const std::string key = ModelKey(plan);
  if (model_ && key == model_key_) return absl::OkStatus();
  model_.reset();  // before the next one is read: there may not be room for both
  KVASIR_ASSIGN_OR_RETURN(model_, LoadModel({.model = plan.model(),
                                             .kv = plan.kv(),
                                             .rank = plan.tensor_parallel_rank(),
                                             .num_ranks = plan.tensor_parallel_size(),
                                             .progress = progress},
                                            backend_));
  model_key_ = key;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Collective>> GroupMember::Connect(const v1::ShardPlan& plan,
                                                                 CoordinatorStream& stream) {
  if (plan.tensor_parallel_size() == 1) return std::make_unique<SingleCollective>();
  return GlooCollective::Connect({.rank = static_cast<int>(plan.tensor_parallel_rank()),
                                  .size = static_cast<int>(plan.tensor_parallel_size()),
                                  .host = options_.collective_host,
                                  .timeout = absl::Seconds(plan.collective_timeout_s())},
                                 stream.rendezvous());
}

absl::StatusOr<std::unique_ptr<Engine>> GroupMember::MakeEngine(const v1::ShardPlan& plan,
                                                                Collective& collective,
                                                                const Progress& progress) {
  const absl::string_view hash(reinterpret_cast<const char*>(model_->weights_hash.data()),
                               model_->weights_hash.size());
  const EngineOptions options = {
      .group_epoch = plan.group_epoch(),
      .max_num_seqs = plan.max_num_seqs(),
      .max_num_batched_tokens = plan.max_num_batched_tokens(),
      .kv_dtype = model_->kv_dtype,
      .kv = {.device = GbToBytes(plan.kv().kv_device_size_gb()),
             .host = GbToBytes(plan.kv().kv_host_size_gb())},
      .on_demand_bytes = GbToBytes(plan.kv().kv_on_demand_size_gb()),
      .ranks_on_machine = plan.ranks_on_machine(),
      .gpu_memory_utilization = plan.kv().gpu_memory_utilization(),
      .weights_hash = std::string(hash),
      .kv_form = model_->kv_form,
      .policies = {plan.policies().begin(), plan.policies().end()},
      // Measuring reads every page.
      .mass_sample_rate = plan.kv().kv_on_demand_size_gb() > 0 ? 0 : plan.mass_sample_rate(),
      .memory = options_.memory,
      .on_stage = [&](absl::string_view stage) { progress(stage, 0); }};
  const kvstore::KvShard shard = KvShardOf(options, *model_->transformer);
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Tier> below, MakeTier(plan, shard));
  return Engine::Create(options, *model_->transformer, collective, std::move(below));
}

// Returns the tier below the host tier: the disk, and with --peer-listen the peers. Null: none.
absl::StatusOr<std::unique_ptr<kvstore::Tier>> GroupMember::MakeTier(
    const v1::ShardPlan& plan, const kvstore::KvShard& shard) const {
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<kvstore::Tier> disk,
      OpenDisk({.config = plan.kv(),
                .shard = shard,
                .kv_replicas = model_->transformer->options().shard.kv_replicas}));
  if (options_.peer_listen.empty()) {
    if (plan.peers().empty()) return disk;
    return absl::FailedPreconditionError(
        "the coordinator has --peers, and this worker no --peer-listen; give it one");
  }
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PeerTier> peers,
                          PeerTier::Create({.listen = options_.peer_listen,
                                            .transports = options_.peer_transports,
                                            .shard = shard,
                                            .peers = {plan.peers().begin(), plan.peers().end()},
                                            .secret = options_.peer_secret},
                                           std::move(disk)));
  spdlog::info("peers: listening on {}, {} other replicas to ask", peers->address(),
               plan.peers_size());
  return std::unique_ptr<kvstore::Tier>(std::move(peers));
}

v1::WorkerMessage GroupMember::MakeReady(const v1::ShardPlan& plan, const Engine& engine) const {
  const TransformerOptions& model = model_->transformer->options();
  v1::WorkerMessage message;
  v1::Ready& ready = *message.mutable_ready();
  ready.set_weights_hash(model_->weights_hash.data(), model_->weights_hash.size());
  ready.set_kv_form(model_->kv_form);
  ready.set_device_blocks(static_cast<uint64_t>(engine.store().device_blocks()));
  ready.set_host_blocks(static_cast<uint64_t>(engine.store().host_blocks()));
  ready.set_lean_blocks(static_cast<uint64_t>(engine.store().stats().lean_blocks_total));
  ready.set_block_bytes(static_cast<uint64_t>(engine.block_bytes()));
  ready.set_vocab_size(static_cast<uint32_t>(model.config.vocab_size));
  ready.set_max_model_len(static_cast<uint32_t>(model.max_model_len));
  if (model.extension == PositionExtension::kStreaming) {
    ready.set_trained_window(static_cast<uint32_t>(model.config.max_position_embeddings));
  }
  ready.set_device_name(backend_.name());
  ready.set_metrics_address(options_.metrics_address);
  ready.set_attention_parity_tokens(static_cast<uint64_t>(model.config.attention_parity_tokens()));
  ready.set_mass_unmeasured(WhyUnmeasured(plan, *model_->transformer));
  ready.set_disk_blocks(static_cast<uint64_t>(engine.store().stats().tier.capacity_blocks));
  return message;
}

absl::Status GroupMember::RunPlans(Engine& engine, CoordinatorStream& stream) {
  std::deque<v1::StepPlan> under_way;  // begun in the engine
  const auto answer = [&]() -> absl::Status {
    KVASIR_RETURN_IF_ERROR(Answer(under_way.front(), engine, stream));
    under_way.pop_front();
    return absl::OkStatus();
  };
  for (;;) {
    // Waits for a plan. A step that is over before it comes is answered.
    for (int64_t polls = 0; !under_way.empty(); ++polls) {
      if (engine.IsOver() || polls >= kMostDevicePolls) {
        KVASIR_RETURN_IF_ERROR(answer());
      } else if (stream.WaitReadable(kDevicePoll)) {
        break;
      }
    }
    while (under_way.empty() && engine.TierIsBusy() && !stream.WaitReadable(kTierPoll)) {
      engine.PollTier();
      ReportTier(engine, stream);
    }
    std::optional<v1::CoordinatorMessage> message = stream.Read();
    // Nobody receives these replies, but the device must be done with the engine's memory.
    while (!message && !under_way.empty()) KVASIR_RETURN_IF_ERROR(answer());
    if (!message) return absl::OkStatus();
    if (!message->has_step_plan()) {
      return absl::FailedPreconditionError("expected a StepPlan: a stream forms one group");
    }
    v1::StepPlan& plan = *message->mutable_step_plan();
    while (!engine.MayBegin(plan)) KVASIR_RETURN_IF_ERROR(answer());
    KVASIR_RETURN_IF_ERROR(engine.Begin(plan));
    under_way.push_back(std::move(plan));
  }
}

absl::Status GroupMember::Answer(const v1::StepPlan& plan, Engine& engine,
                                 CoordinatorStream& stream) {
  KVASIR_ASSIGN_OR_RETURN(v1::StepReply reply, engine.Finish());
  metrics_.RecordStep(engine, plan, reply);
  ReportTier(engine, stream);
  v1::WorkerMessage message;
  *message.mutable_step_reply() = std::move(reply);
  stream.Write(std::move(message));
  return absl::OkStatus();
}

void GroupMember::ReportTier(Engine& engine, CoordinatorStream& stream) {
  metrics_.RecordTiers(engine);
  v1::TierReport report = engine.TakeTierReport();
  if (report.ByteSizeLong() == 0) return;
  v1::WorkerMessage message;
  *message.mutable_tier_report() = std::move(report);
  stream.Write(std::move(message));
}

}  // namespace kvasir::worker
