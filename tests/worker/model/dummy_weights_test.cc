#include "worker/model/dummy_weights.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "tests/worker/random_model.h"
#include "tests/worker/test_worker.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/checkpoint/weights_layout.h"
#include "worker/loaded_model.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

// Numbers from the models' cards.
TEST(ShapesTest, HaveTheParametersOfTheirModels) {
  const std::map<std::string, int64_t> expected = {{"llama-3.1-8b", 8'030'261'248},
                                                   {"llama-3.1-70b", 70'553'706'496},
                                                   {"qwen2.5-7b", 7'615'616'512}};
  for (const auto& [name, parameters] : expected) {
    const ModelConfig config = LoadModelConfig("tests/model/shapes/" + name).value();
    ModelWeights weights;
    const ShardPlan plan = ShardPlan::Make(config, 0, 1).value();
    const WeightsLayout layout(config, plan, {}, weights);
    int64_t found = 0;
    for (const WeightPart& part : layout.parts()) found += part.slice.rows() * part.slice.cols();
    EXPECT_EQ(found, parameters) << name;
    EXPECT_EQ(config.max_position_embeddings, 131072) << name;
    EXPECT_EQ(config.head_dim, 128) << name;
    EXPECT_EQ(config.rope.kind, name == "qwen2.5-7b" ? RopeKind::kPlain : RopeKind::kLlama3);
  }
}

class DummyWeightsTest : public testing::Test {
 protected:
  ModelWeights Make(int64_t rank, int64_t num_ranks, uint64_t seed = 0) {
    const ShardPlan plan = ShardPlan::Make(config_, rank, num_ranks).value();
    return MakeDummyWeights(config_, {.plan = plan, .dtype = DType::kFloat32, .seed = seed},
                            backend_)
        .value();
  }
  static std::vector<float> Values(const Tensor& tensor) {
    const float* const data = tensor.view.As<float>();
    return {data, data + tensor.view.num_elements()};
  }
  static std::vector<float> Rows(const Tensor& tensor, int64_t begin, int64_t count) {
    const std::vector<float> all = Values(tensor);
    const int64_t width = std::ssize(all) / tensor.view.dim(0);
    return {all.begin() + begin * width, all.begin() + (begin + count) * width};
  }

  ModelConfig config_ = [] {
    ModelConfig config = RandomModelShape();
    config.qkv_bias = true;
    return config;
  }();
  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
};

TEST_F(DummyWeightsTest, ASeedIsAModel) {
  EXPECT_EQ(Values(Make(0, 1).layers[1].qkv), Values(Make(0, 1).layers[1].qkv));
  EXPECT_NE(Values(Make(0, 1).layers[1].qkv), Values(Make(0, 1, 1).layers[1].qkv));
  EXPECT_NE(Values(Make(0, 1).layers[0].qkv), Values(Make(0, 1).layers[1].qkv));
}

TEST_F(DummyWeightsTest, RanksHaveTheirSlicesOfOneModel) {
  const ModelWeights whole = Make(0, 1);
  const int64_t d = config_.head_dim, q = config_.num_heads * d, kv = config_.num_kv_heads * d;
  for (const int64_t rank : {0, 1}) {
    const ModelWeights part = Make(rank, 2);
    const LayerWeights &own = part.layers[2], &all = whole.layers[2];
    EXPECT_EQ(Rows(own.qkv, 0, q / 2), Rows(all.qkv, rank * q / 2, q / 2));
    EXPECT_EQ(Rows(own.qkv, q / 2, kv / 2), Rows(all.qkv, q + rank * kv / 2, kv / 2));
    EXPECT_EQ(Rows(own.qkv_bias, q / 2, kv / 2), Rows(all.qkv_bias, q + rank * kv / 2, kv / 2));
    const int64_t columns = config_.intermediate_size / 2;
    for (int64_t row = 0; row < config_.hidden_size; ++row) {
      const std::vector<float> of_all = Rows(all.down, row, 1);
      EXPECT_EQ(Rows(own.down, row, 1), std::vector<float>(of_all.begin() + rank * columns,
                                                           of_all.begin() + (rank + 1) * columns));
    }
    EXPECT_EQ(Values(part.embedding), Values(whole.embedding));
  }
}

TEST_F(DummyWeightsTest, ATiedHeadIsTheEmbedding) {
  config_.tie_word_embeddings = true;
  const ModelWeights weights = Make(1, 2);
  const int64_t begin = ShardPlan::Make(config_, 1, 2)->vocab.begin;
  EXPECT_EQ(Values(weights.lm_head), Rows(weights.embedding, begin, config_.vocab_size - begin));
}

class DummyModelTest : public testing::Test {
 protected:
  absl::StatusOr<LoadedModel> Load(const std::string& load_format) {
    LoadModelOptions options;
    options.progress = [](absl::string_view, double) {};
    options.model.set_model(folder_.path());
    options.model.set_load_format(load_format);
    return LoadModel(options, backend_);
  }
  // A folder with a configuration of 24 layers and no weights.
  void SetUp() override {
    const RandomModel shape;
    auto config = nlohmann::json::parse(ReadFile(shape.folder() + "/config.json"));
    config["num_hidden_layers"] = 24;
    WriteFile(folder_.File("config.json"), config.dump());
  }

  TemporaryFolder folder_;
  kernels::SerialExecutor executor_;
  CpuBackend backend_{executor_};
};

TEST_F(DummyModelTest, NeedsNoWeightsAndItsActivationsStayFinite) {
  EXPECT_FALSE(Load("safetensors").ok());
  LoadedModel loaded = Load("dummy").value();
  SingleCollective single;
  const auto engine =
      Engine::Create(TestWorker::DefaultOptions(), *loaded.transformer, single).value();
  int64_t sampled = 0;
  engine->set_logits_tap([&](int64_t, int64_t, std::span<const float> logits) {
    ++sampled;
    double squares = 0;
    for (const float logit : logits) squares += static_cast<double>(logit) * logit;
    EXPECT_NEAR(std::sqrt(squares / static_cast<double>(logits.size())), 1, 0.5);
  });
  TestCoordinator coordinator({});
  std::vector<uint32_t> prompt(300);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i % 101);
  coordinator.Add(MakeSparseRequest(prompt, 0));
  while (!coordinator.done()) {
    const v1::StepPlan plan = coordinator.NextPlan();
    const absl::StatusOr<v1::StepReply> reply = engine->Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    ASSERT_NO_FATAL_FAILURE(coordinator.Apply(plan, *reply));
  }
  EXPECT_TRUE(coordinator.result(0).status.ok()) << coordinator.result(0).status;
  EXPECT_EQ(sampled, 8);
}

TEST_F(DummyModelTest, HasAHashOfItsOwn) {
  EXPECT_EQ(Load("dummy")->weights_hash, Load("dummy")->weights_hash);
  auto config = nlohmann::json::parse(ReadFile(folder_.File("config.json")));
  const ModelHash hash = Load("dummy")->weights_hash;
  config["num_hidden_layers"] = 2;
  WriteFile(folder_.File("config.json"), config.dump());
  EXPECT_NE(Load("dummy")->weights_hash, hash);
}

TEST_F(DummyModelTest, OtherFormatsAreRefusedByName) {
  const absl::Status status = Load("gguf").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("safetensors or dummy"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace kvasir::worker
