// An engine with everything it borrows, for tests: a model loaded from a folder, the backend that
// computes it, and the logits of every sampled row.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "proto/selector_field.h"
#include "tests/support/rounding_backend.h"
#include "tests/worker/test_coordinator.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/engine/engine.h"
#include "worker/make_backend.h"
#include "worker/model/dummy_weights.h"
#include "worker/model/load_weights.h"
#include "worker/parallel/single_collective.h"
#include "worker/thread_pool.h"

namespace kvasir::worker {

inline v1::SparsityPolicy MakePolicy(const std::string& prefill, const std::string& decode) {
  v1::SparsityPolicy policy;
  v1::SetSelector(prefill, *policy.mutable_prefill());
  v1::SetSelector(decode, *policy.mutable_decode());
  return policy;
}

// A policy that decodes with quest and a pruner; each request says how much mass to keep.
inline v1::SparsityPolicy MakePruningPolicy() {
  v1::SparsityPolicy policy = MakePolicy("all", "quest");
  policy.mutable_decode()->set_top_p(1);
  return policy;
}

// A policy whose decoding reuses its selections.
inline v1::SparsityPolicy MakeReusingPolicy(const std::string& selector, const std::string& rule) {
  v1::SparsityPolicy policy = MakePolicy("all", selector);
  policy.mutable_decode()->mutable_reuse()->set_rule(rule);
  if (selector == "infinitehip") policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  return policy;
}

// The same where all heads of a layer share a selection.
inline v1::SparsityPolicy MakeLayerPolicy(const std::string& selector, const std::string& rule) {
  v1::SparsityPolicy policy = MakeReusingPolicy(selector, rule);
  if (selector == "infinitehip") {
    policy.mutable_decode()->mutable_infinitehip()->set_scope("layer");
    *policy.mutable_prefill()->mutable_infinitehip() = policy.decode().infinitehip();
  } else {
    policy.mutable_decode()->mutable_tokenselect()->set_scope("layer");
    *policy.mutable_prefill()->mutable_tokenselect() = policy.decode().tokenselect();
  }
  return policy;
}

// A policy that decodes with a terminator that ends rows of few pages, also in models that attend
// to everything alike: the pages left unread matter. Each request gives its own patience.
inline v1::SparsityPolicy MakeTerminatingPolicy(const std::string& decode,
                                                const std::string& order) {
  v1::SparsityPolicy policy = MakePolicy("all", decode);
  v1::ArtTerminator& art = *policy.mutable_decode()->mutable_art();
  art.set_guard("none");
  art.set_order(order);
  art.set_scale_tolerance(1);
  art.set_direction_tolerance(1);
  art.set_mass_tolerance(0.2f);
  return policy;
}

// A policy under a contract of quality; each request gives its own minimum mass.
inline v1::SparsityPolicy MakeContractPolicy(v1::SparsityPolicy policy) {
  policy.mutable_decode()->mutable_quality()->set_min_mass(0.5f);
  return policy;
}

// A policy with chunks that fit the short prompts of tests.
inline v1::SparsityPolicy MakeInfiniteHipPolicy() {
  v1::SparsityPolicy policy = MakePolicy("infinitehip", "infinitehip");
  policy.mutable_prefill()->mutable_infinitehip()->set_preset("5k");
  policy.mutable_prefill()->mutable_infinitehip()->set_probe("centre");
  policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  return policy;
}

inline v1::AttentionPolicy MakeNumbers(uint32_t sink, uint32_t window, uint32_t budget,
                                       uint32_t dense_layers = 0) {
  v1::AttentionPolicy numbers;
  numbers.set_sink_tokens(sink);
  numbers.set_window_tokens(window);
  numbers.set_token_budget(budget);
  numbers.set_dense_layers(dense_layers);
  return numbers;
}

// Sets numbers that the policies of TestWorker::DefaultOptions need beside those of MakeNumbers.
inline void SetWhatThePolicyNeeds(TestRequest& request) {
  if (request.policy == 6 || request.policy == 10 ||
      request.policy == 12) {  // infinitehip's least window with preset 5k
    request.prefill.set_window_tokens(128);
    request.decode.set_window_tokens(128);
  }
  if (request.policy == 7) request.decode.set_top_p(0.5f);
  const bool reuses = request.policy >= 8 && request.policy <= 12;
  if (reuses || request.policy == 16) {  // queries of tests are sometimes alike
    v1::ReusePolicy& reuse = *request.decode.mutable_reuse();
    reuse.set_interval(3);
    reuse.set_theta(0.05f);
    reuse.set_theta_force(-0.1f);
    reuse.set_max_age(20);
  }
  if (request.policy == 13 || request.policy == 14) request.decode.set_patience(1);
  if (request.policy == 14) request.decode.set_token_budget(640);  // enough pages to end among
  if (request.policy >= 15) {
    v1::QualityPolicy& quality = *request.decode.mutable_quality();
    quality.set_min_mass(0.7f);
    quality.set_on_violation(request.policy == 15 ? "dense" : "widen");
    v1::LayerBudget& layers = *request.decode.add_layer_budgets();
    layers.set_first_layer(1);
    layers.set_last_layer(1);
    layers.set_token_budget(96);
  }
}

inline v1::RowSampling Greedy() {
  v1::RowSampling sampling;
  sampling.set_top_p(1);
  sampling.set_repetition_penalty(1);
  return sampling;
}

// A request with numbers so small that contexts of a few hundred tokens are sparse.
inline TestRequest MakeSparseRequest(std::vector<uint32_t> prompt, uint32_t policy,
                                     int64_t max_tokens = 8) {
  TestRequest request = {.prompt = std::move(prompt),
                         .max_tokens = max_tokens,
                         .policy = policy,
                         .prefill = MakeNumbers(32, 100, 128),
                         .decode = MakeNumbers(16, 70, 64),
                         .tail_tokens = 20,
                         .sampling = Greedy(),
                         .cached_blocks = {}};
  SetWhatThePolicyNeeds(request);
  return request;
}

struct TestWorkerOptions {
  std::string folder;
  bool dummy_weights = false;  // the folder has a shape alone, or its weights are left
  int64_t num_kv_heads = 0;    // in place of the model's, with dummy weights; 0: the model's
  int64_t rank = 0;
  int64_t num_ranks = 1;
  kernels::DType dtype = kernels::DType::kFloat32;
  int64_t max_model_len = 4096;
  PositionExtension extension = PositionExtension::kNone;
  kernels::GroupedPositions grouped = {};
  std::vector<int64_t> layer_windows = {};  // in place of the model's; empty: the model's
  int num_threads = 1;
  std::string device = "cpu";
  // Whether attention can be rounded differently (TestModel::rounding): for bfloat16 on a CPU.
  bool can_round = false;
  // Called on the weights before they are packed, in host memory.
  std::function<void(ModelWeights&)> edit_weights;
};

// A transformer with the backend that computes it.
class TestModel {
 public:
  explicit TestModel(const TestWorkerOptions& options)
      : executor_(options.num_threads), backend_(MakeBackend(options.device, executor_).value()) {
    ModelConfig config = LoadModelConfig(options.folder).value();
    if (!options.layer_windows.empty()) config.layer_windows = options.layer_windows;
    if (options.num_kv_heads != 0) config.num_kv_heads = options.num_kv_heads;
    const ShardPlan shard = ShardPlan::Make(config, options.rank, options.num_ranks).value();
    transformer_ = Transformer::Create(MakeWeights(options, config, shard),
                                       {.config = config,
                                        .shard = shard,
                                        .dtype = options.dtype,
                                        .max_model_len = options.max_model_len,
                                        .extension = options.extension,
                                        .grouped = options.grouped},
                                       options.can_round ? rounding_ : *backend_)
                       .value();
  }

  Transformer& transformer() { return *transformer_; }
  RoundingBackend& rounding() { return rounding_; }

 private:
  ModelWeights MakeWeights(const TestWorkerOptions& options, const ModelConfig& config,
                           const ShardPlan& shard) {
    if (options.dummy_weights) {
      return MakeDummyWeights(config, {.plan = shard, .dtype = options.dtype}, *backend_).value();
    }
    const SafetensorsFolder tensors = SafetensorsFolder::Open(options.folder).value();
    CpuBackend host(executor_);
    ModelWeights weights =
        LoadWeights(tensors, config, {.plan = shard, .dtype = options.dtype, .progress = {}},
                    options.edit_weights ? host : *backend_)
            .value();
    if (options.edit_weights) options.edit_weights(weights);
    return weights;
  }

  ThreadPool executor_;
  std::unique_ptr<Backend> backend_;
  RoundingBackend rounding_{*backend_};
  std::unique_ptr<Transformer> transformer_;
};

class TestWorker {
 public:
  using Logits = std::vector<float>;

  // Enough room for everything unless the options say otherwise.
  static EngineOptions DefaultOptions() {
    return {.group_epoch = 1,
            .max_num_seqs = 16,
            .max_num_batched_tokens = 4096,
            .kv_dtype = kernels::DType::kFloat32,
            .kv = {.device = 64 << 20, .host = 64 << 20},
            .policies = {MakePolicy("all", "all"), MakePolicy("streaming", "streaming"),
                         MakePolicy("quest", "quest"), MakePolicy("all", "quest"),
                         MakePolicy("tokenselect", "tokenselect"), MakePolicy("hip", "hip"),
                         MakeInfiniteHipPolicy(), MakePruningPolicy(),
                         MakeReusingPolicy("hip", "interval"),
                         MakeReusingPolicy("tokenselect", "cosine"),
                         MakeReusingPolicy("infinitehip", "both"),
                         MakeLayerPolicy("tokenselect", "cosine"),
                         MakeLayerPolicy("infinitehip", "interval"),
                         MakeTerminatingPolicy("all", "recency"),
                         MakeTerminatingPolicy("quest", "importance"),
                         MakeContractPolicy(MakePolicy("all", "tokenselect")),
                         MakeContractPolicy(MakeReusingPolicy("hip", "interval"))},
            .mass_sample_rate = 0};
  }

  TestWorker(TestModel& model, Collective& collective,
             const EngineOptions& options = DefaultOptions(),
             std::unique_ptr<kvstore::Tier> below = nullptr) {
    engine_ = Engine::Create(options, model.transformer(), collective, std::move(below)).value();
    engine_->set_logits_tap([this](int64_t slot, int64_t position, std::span<const float> row) {
      logits_[{slot, position}] = Logits(row.begin(), row.end());
    });
  }
  explicit TestWorker(TestModel& model, const EngineOptions& options = DefaultOptions(),
                      std::unique_ptr<kvstore::Tier> below = nullptr)
      : TestWorker(model, single_, options, std::move(below)) {}

  Engine& engine() { return *engine_; }
  // Keyed by (slot, position of the last token before the sampled one).
  const std::map<std::pair<int64_t, int64_t>, Logits>& logits() const { return logits_; }

  // Carries out plans until every request is done.
  void Run(TestCoordinator& coordinator) {
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      const absl::StatusOr<v1::StepReply> reply = engine_->Step(plan);
      ASSERT_TRUE(reply.ok()) << reply.status();
      ASSERT_NO_FATAL_FAILURE(coordinator.Apply(plan, *reply));
      ASSERT_TRUE(engine_->store().CheckIntegrity().ok()) << engine_->store().CheckIntegrity();
    }
  }

  // Like Run, but every plan is made before the one before it is answered, and begins if it may.
  void RunAhead(TestCoordinator& coordinator) {
    std::deque<v1::StepPlan> unanswered;
    const auto answer = [&] {
      const absl::StatusOr<v1::StepReply> reply = engine_->Finish();
      ASSERT_TRUE(reply.ok()) << reply.status();
      ASSERT_NO_FATAL_FAILURE(coordinator.Apply(unanswered.front(), *reply));
      unanswered.pop_front();
    };
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      while (!engine_->MayBegin(plan)) {
        ASSERT_NO_FATAL_FAILURE(answer());
      }
      ASSERT_EQ(engine_->Begin(plan), absl::OkStatus());
      unanswered.push_back(plan);
      if (unanswered.size() == 2) {
        ASSERT_NO_FATAL_FAILURE(answer());
      }
    }
    while (!unanswered.empty()) {
      ASSERT_NO_FATAL_FAILURE(answer());
    }
    ASSERT_TRUE(engine_->store().CheckIntegrity().ok()) << engine_->store().CheckIntegrity();
  }

 private:
  SingleCollective single_;
  std::unique_ptr<Engine> engine_;
  std::map<std::pair<int64_t, int64_t>, Logits> logits_;
};

}  // namespace kvasir::worker
