#include <cstring>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/executor.h"
#include "tests/support/thread_executor.h"
#include "tests/worker/model/test_checkpoint.h"
#include "tests/worker/model/test_files.h"
#include "worker/backend/cpu/cpu_backend.h"
#include "worker/model/load_weights.h"

namespace kvasir::worker {
namespace {

using kernels::BFloat16;
using kernels::DType;
using kernels::TensorView;
using ::testing::HasSubstr;

double Element(const TensorView& view, int64_t row, int64_t col) {
  const int64_t cols = view.rank() == 2 ? view.dim(1) : 1;
  const int64_t i = row * cols + col;
  return static_cast<double>(view.dtype() == DType::kFloat32
                                 ? view.As<float>()[i]
                                 : static_cast<float>(view.As<BFloat16>()[i]));
}

class LoadWeightsTest : public testing::Test {
 protected:
  // A checkpoint of TinyModel() in one file.
  void Write(const TestCheckpoint& checkpoint) {
    WriteFile(folder_.File("model.safetensors"), SafetensorsBytes(checkpoint.tensors()));
  }
  absl::StatusOr<ModelWeights> Load(const ModelConfig& config, int64_t rank, int64_t num_ranks,
                                    DType dtype = DType::kFloat32) {
    KVASIR_ASSIGN_OR_RETURN(const SafetensorsFolder folder,
                            SafetensorsFolder::Open(folder_.path()));
    LoadWeightsOptions options{.plan = {}, .dtype = dtype, .progress = {}};
    KVASIR_ASSIGN_OR_RETURN(options.plan, ShardPlan::Make(config, rank, num_ranks));
    return LoadWeights(folder, config, options, backend_);
  }
  std::string LoadError(const ModelConfig& config, absl::StatusCode code, int64_t rank = 0,
                        int64_t num_ranks = 1, DType dtype = DType::kFloat32) {
    const absl::Status status = Load(config, rank, num_ranks, dtype).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  TemporaryFolder folder_;
  tests::ThreadExecutor executor_{3};
  CpuBackend backend_{executor_};
};

// Rows [row, row + size) of `view` equal rows `rows`, columns [col_begin, ...) of the checkpoint's.
void ExpectRows(const TestCheckpoint& checkpoint, const TensorView& view, int64_t row,
                const std::string& name, IndexRange rows, int64_t col_begin = 0) {
  const int64_t cols = view.rank() == 2 ? view.dim(1) : 1;
  ASSERT_LE(row + rows.size(), view.dim(0)) << name;
  for (int64_t r = 0; r < rows.size(); ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      ASSERT_EQ(Element(view, row + r, c), checkpoint.Value(name, rows.begin + r, col_begin + c))
          << name << " at " << r << ", " << c;
    }
  }
}

void ExpectSameBytes(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.view.size_bytes(), b.view.size_bytes());
  EXPECT_EQ(std::memcmp(a.view.data(), b.view.data(), static_cast<size_t>(a.view.size_bytes())), 0);
}

void ExpectLayer(const TestCheckpoint& checkpoint, const ModelConfig& config, const ShardPlan& plan,
                 int64_t index, const LayerWeights& layer) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const int64_t d = config.head_dim;
  const IndexRange hidden{0, config.hidden_size};
  const IndexRange q{plan.query_heads.begin * d, plan.query_heads.end * d};
  const IndexRange kv{plan.kv_heads.begin * d, plan.kv_heads.end * d};
  ASSERT_EQ(layer.qkv.view.dim(0), q.size() + 2 * kv.size());
  const auto attention = [&prefix](const char* name) {
    return absl::StrCat(prefix, "self_attn.", name);
  };
  ExpectRows(checkpoint, layer.input_norm.view, 0, prefix + "input_layernorm.weight", hidden);
  ExpectRows(checkpoint, layer.qkv.view, 0, attention("q_proj.weight"), q);
  ExpectRows(checkpoint, layer.qkv.view, q.size(), attention("k_proj.weight"), kv);
  ExpectRows(checkpoint, layer.qkv.view, q.size() + kv.size(), attention("v_proj.weight"), kv);
  EXPECT_EQ(layer.qkv_bias.view.empty(), !config.qkv_bias);
  if (config.qkv_bias) {
    ExpectRows(checkpoint, layer.qkv_bias.view, 0, attention("q_proj.bias"), q);
    ExpectRows(checkpoint, layer.qkv_bias.view, q.size(), attention("k_proj.bias"), kv);
    ExpectRows(checkpoint, layer.qkv_bias.view, q.size() + kv.size(), attention("v_proj.bias"), kv);
  }
  EXPECT_EQ(layer.q_norm.view.empty(), !config.qk_norm);
  if (config.qk_norm) {
    ExpectRows(checkpoint, layer.q_norm.view, 0, attention("q_norm.weight"), {0, d});
    ExpectRows(checkpoint, layer.k_norm.view, 0, attention("k_norm.weight"), {0, d});
  }
  ASSERT_EQ(layer.output.view.dim(1), q.size());
  ExpectRows(checkpoint, layer.output.view, 0, attention("o_proj.weight"), hidden, q.begin);
  EXPECT_EQ(layer.output_bias.view.empty(), !config.output_bias || plan.rank != 0);
  if (!layer.output_bias.view.empty()) {
    ExpectRows(checkpoint, layer.output_bias.view, 0, attention("o_proj.bias"), hidden);
  }
  ExpectRows(checkpoint, layer.post_attention_norm.view, 0,
             prefix + "post_attention_layernorm.weight", hidden);
  const IndexRange columns = plan.intermediate;
  ASSERT_EQ(layer.gate_up.view.dim(0), 2 * columns.size());
  ASSERT_EQ(layer.down.view.dim(1), columns.size());
  ExpectRows(checkpoint, layer.gate_up.view, 0, prefix + "mlp.gate_proj.weight", columns);
  ExpectRows(checkpoint, layer.gate_up.view, columns.size(), prefix + "mlp.up_proj.weight",
             columns);
  ExpectRows(checkpoint, layer.down.view, 0, prefix + "mlp.down_proj.weight", hidden,
             columns.begin);
}

void ExpectModel(const TestCheckpoint& checkpoint, const ModelConfig& config, const ShardPlan& plan,
                 const ModelWeights& weights) {
  ASSERT_EQ(weights.embedding.view.dim(0), config.vocab_size);
  ExpectRows(checkpoint, weights.embedding.view, 0, "model.embed_tokens.weight",
             {0, config.vocab_size});
  ASSERT_EQ(static_cast<int64_t>(weights.layers.size()), config.num_layers);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    ExpectLayer(checkpoint, config, plan, i, weights.layers[static_cast<size_t>(i)]);
  }
  ExpectRows(checkpoint, weights.final_norm.view, 0, "model.norm.weight", {0, config.hidden_size});
  ASSERT_EQ(weights.lm_head.view.dim(0), plan.vocab.size());
  ExpectRows(
      checkpoint, weights.lm_head.view, 0,
      config.tie_word_embeddings.value_or(false) ? "model.embed_tokens.weight" : "lm_head.weight",
      plan.vocab);
}

// 8 query heads over 2 KV heads: 4 and 8 ranks replicate KV heads. No number of ranks divides the
// vocabulary.
TEST_F(LoadWeightsTest, EachRankHoldsItsSlicesOfEveryTensor) {
  for (const bool tied : {false, true}) {
    for (const bool with_all_extras : {false, true}) {
      ModelConfig config = TinyModel();
      config.tie_word_embeddings = tied;
      config.qkv_bias = config.output_bias = config.qk_norm = with_all_extras;
      const TestCheckpoint checkpoint(config, "BF16");
      Write(checkpoint);
      for (const int64_t num_ranks : {1, 2, 4, 8}) {
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
          SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", num_ranks, " tied ", tied));
          const auto weights = Load(config, rank, num_ranks);
          ASSERT_TRUE(weights.ok()) << weights.status();
          const ShardPlan plan = ShardPlan::Make(config, rank, num_ranks).value();
          ExpectModel(checkpoint, config, plan, *weights);
        }
      }
    }
  }
}

TEST_F(LoadWeightsTest, EveryFileDtypeGoesToEveryComputeDtype) {
  const ModelConfig config = TinyModel();
  for (const char* file_dtype : {"F32", "BF16", "F16"}) {
    const TestCheckpoint checkpoint(config, file_dtype);
    Write(checkpoint);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const auto weights = Load(config, 1, 2, dtype);
      ASSERT_TRUE(weights.ok()) << weights.status();
      EXPECT_EQ(weights->layers[0].down.view.dtype(), dtype);
      ExpectModel(checkpoint, config, ShardPlan::Make(config, 1, 2).value(), *weights);
    }
  }
}

TEST_F(LoadWeightsTest, MemoryIsAlignedAndTheRanksShareOnly) {
  const ModelConfig config = TinyModel();
  Write(TestCheckpoint(config, "BF16"));
  const auto weights = Load(config, 1, 2, DType::kBFloat16);
  ASSERT_TRUE(weights.ok()) << weights.status();
  for (const LayerWeights& layer : weights->layers) {
    for (const Tensor* tensor :
         {&layer.input_norm, &layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->view.data()) % 64, 0u);
      EXPECT_EQ(tensor->memory.size_bytes(), tensor->view.size_bytes());
    }
  }
  // Half of these: 16 + 2 * 4 heads' rows of q, k, v and the columns of o, and three MLP matrices.
  const LayerWeights& layer = weights->layers[0];
  EXPECT_EQ(layer.qkv.memory.size_bytes(), (8 + 2 * 2) / 2 * 4 * 16 * 2);
  EXPECT_EQ(layer.output.memory.size_bytes(), 16 * 8 / 2 * 4 * 2);
  EXPECT_EQ(layer.gate_up.memory.size_bytes(), 2 * 24 / 2 * 16 * 2);
  EXPECT_EQ(layer.down.memory.size_bytes(), 16 * 24 / 2 * 2);
}

TEST_F(LoadWeightsTest, ATiedHeadIsAViewOfTheEmbedding) {
  ModelConfig config = TinyModel();
  config.tie_word_embeddings = true;
  Write(TestCheckpoint(config, "BF16"));
  const auto weights = Load(config, 1, 2);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->lm_head.memory.data(), nullptr);
  EXPECT_EQ(weights->lm_head.view.As<float>(),
            weights->embedding.view.As<float>() + 19 * config.hidden_size);
}

TEST_F(LoadWeightsTest, ATiedCheckpointThatHasAHeadUsesIt) {
  ModelConfig config = TinyModel();
  const TestCheckpoint checkpoint(config, "BF16");
  Write(checkpoint);
  config.tie_word_embeddings = true;
  const auto weights = Load(config, 0, 1);
  ASSERT_TRUE(weights.ok()) << weights.status();
  ExpectRows(checkpoint, weights->lm_head.view, 0, "lm_head.weight", {0, config.vocab_size});
}

TEST_F(LoadWeightsTest, LargeTensorsAreReadInChunks) {
  ModelConfig config = TinyModel();
  config.num_layers = 1;
  config.vocab_size = 80'000;  // rows of 64 bytes: more than two chunks of 2 MiB
  const TestCheckpoint checkpoint(config, "F32");
  Write(checkpoint);
  const auto weights = Load(config, 1, 2);
  ASSERT_TRUE(weights.ok()) << weights.status();
  ExpectModel(checkpoint, config, ShardPlan::Make(config, 1, 2).value(), *weights);
}

// Shards of one tensor each, on one thread and on several.
TEST_F(LoadWeightsTest, ShardsAndThreadsGiveTheSameBits) {
  ModelConfig config = TinyModel();
  config.qkv_bias = config.output_bias = config.qk_norm = true;
  const TestCheckpoint checkpoint(config, "F16");
  Write(checkpoint);
  const ModelWeights whole = Load(config, 1, 4, DType::kBFloat16).value();
  const TemporaryFolder shards;
  nlohmann::json index;
  for (const TestTensor& tensor : checkpoint.tensors()) {
    const std::string name = absl::StrCat(tensor.name, ".safetensors");
    WriteFile(shards.File(name), SafetensorsBytes({tensor}));
    index["weight_map"][tensor.name] = name;
  }
  WriteFile(shards.File("model.safetensors.index.json"), index.dump());
  const SafetensorsFolder folder = SafetensorsFolder::Open(shards.path()).value();
  const LoadWeightsOptions options{
      .plan = ShardPlan::Make(config, 1, 4).value(), .dtype = DType::kBFloat16, .progress = {}};
  kernels::SerialExecutor serial;
  CpuBackend backend(serial);
  const ModelWeights sharded = LoadWeights(folder, config, options, backend).value();
  for (size_t i = 0; i < whole.layers.size(); ++i) {
    const LayerWeights &a = whole.layers[i], &b = sharded.layers[i];
    ExpectSameBytes(a.qkv, b.qkv);
    ExpectSameBytes(a.qkv_bias, b.qkv_bias);
    ExpectSameBytes(a.output, b.output);
    ExpectSameBytes(a.gate_up, b.gate_up);
    ExpectSameBytes(a.down, b.down);
  }
  ExpectSameBytes(whole.embedding, sharded.embedding);
  ExpectSameBytes(whole.lm_head, sharded.lm_head);
}

TEST_F(LoadWeightsTest, AFileThatShrinksWhileItIsReadIsDataLoss) {
  const ModelConfig config = TinyModel();
  Write(TestCheckpoint(config, "BF16"));
  const SafetensorsFolder folder = SafetensorsFolder::Open(folder_.path()).value();
  const std::string path = folder_.File("model.safetensors");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  const LoadWeightsOptions options{.plan = ShardPlan::Make(config, 0, 1).value(), .progress = {}};
  const absl::Status status = LoadWeights(folder, config, options, backend_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(path, " ends at byte ")));
}

TEST_F(LoadWeightsTest, OfSeveralBadWeightsTheFirstIsNamed) {
  const ModelConfig config = TinyModel();
  TestCheckpoint checkpoint(config, "F32");
  for (const char* name : {"lm_head.weight", "model.layers.1.mlp.up_proj.weight",
                           "model.layers.0.mlp.down_proj.weight", "model.norm.weight"}) {
    checkpoint.Set(name, 1, 0, std::numeric_limits<float>::quiet_NaN());
  }
  Write(checkpoint);
  for (int round = 0; round < 20; ++round) {
    ASSERT_THAT(LoadError(config, absl::StatusCode::kDataLoss),
                HasSubstr("\"model.layers.0.mlp.down_proj.weight\" at [1, 0]"));
  }
}

// Each tensor in turn is missing, of a wrong shape, or of an unreadable dtype.
TEST_F(LoadWeightsTest, EveryTensorIsCheckedOnEveryRank) {
  ModelConfig config = TinyModel();
  config.num_layers = 1;
  config.tie_word_embeddings = false;
  config.qkv_bias = config.output_bias = config.qk_norm = true;
  const TestCheckpoint whole(config, "BF16");
  for (const TestTensor& tensor : whole.tensors()) {
    TestCheckpoint checkpoint = whole;
    checkpoint.Remove(tensor.name);
    Write(checkpoint);
    EXPECT_THAT(LoadError(config, absl::StatusCode::kInvalidArgument, 1, 2),
                HasSubstr("no tensor \"" + tensor.name + "\", expected one of shape ["));

    checkpoint = whole;
    checkpoint.Find(tensor.name).shape.insert(checkpoint.Find(tensor.name).shape.begin(), 1);
    Write(checkpoint);
    EXPECT_THAT(LoadError(config, absl::StatusCode::kInvalidArgument, 1, 2),
                testing::AllOf(HasSubstr("\"" + tensor.name + "\" is BF16[1, "),
                               HasSubstr("that config.json implies")));

    checkpoint = whole;
    checkpoint.Find(tensor.name).dtype = "I16";
    Write(checkpoint);
    EXPECT_THAT(LoadError(config, absl::StatusCode::kUnimplemented, 1, 2),
                HasSubstr("\"" + tensor.name + "\" is I16["));
  }
}

TEST_F(LoadWeightsTest, WithoutAWordAboutTyingTheCheckpointTells) {
  const ModelConfig config = TinyModel();
  TestCheckpoint checkpoint(config, "BF16");
  Write(checkpoint);
  const auto own = Load(config, 0, 1);
  ASSERT_TRUE(own.ok()) << own.status();
  ExpectRows(checkpoint, own->lm_head.view, 0, "lm_head.weight", {0, config.vocab_size});
  checkpoint.Remove("lm_head.weight");
  Write(checkpoint);
  const auto tied = Load(config, 0, 1);
  ASSERT_TRUE(tied.ok()) << tied.status();
  EXPECT_EQ(tied->lm_head.view.data(), tied->embedding.view.data());
}

TEST_F(LoadWeightsTest, ACheckpointOfTheBareModelHasShorterNames) {
  ModelConfig config = TinyModel();
  config.tie_word_embeddings = true;
  const TestCheckpoint whole(config, "BF16");
  TestCheckpoint bare = whole;
  bare.DropPrefix("model.");
  Write(bare);
  const auto weights = Load(config, 1, 2);
  ASSERT_TRUE(weights.ok()) << weights.status();
  ExpectModel(whole, config, ShardPlan::Make(config, 1, 2).value(), *weights);
}

TEST_F(LoadWeightsTest, AMissingHeadHintsAtTiedEmbeddings) {
  ModelConfig config = TinyModel();
  config.tie_word_embeddings = false;
  TestCheckpoint checkpoint(config, "BF16");
  checkpoint.Remove("lm_head.weight");
  Write(checkpoint);
  EXPECT_THAT(LoadError(config, absl::StatusCode::kInvalidArgument),
              HasSubstr("(or tie_word_embeddings in config.json)"));
}

TEST_F(LoadWeightsTest, UnexpectedTensorsAreNoError) {
  const ModelConfig config = TinyModel();
  TestCheckpoint checkpoint(config, "BF16");
  checkpoint.Add({"model.layers.0.self_attn.rotary_emb.inv_freq", "F64", {1}, "12345678"});
  checkpoint.Add({"model.layers.7.mlp.down_proj.weight", "BF16", {1}, "12"});
  Write(checkpoint);
  EXPECT_TRUE(Load(config, 0, 1).ok());
}

TEST_F(LoadWeightsTest, AWeightThatIsNotFiniteIsDataLossOnTheRankThatReadsIt) {
  const ModelConfig config = TinyModel();
  const std::string name = "model.layers.1.mlp.down_proj.weight";  // [16, 24], columns are split
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestCheckpoint checkpoint(config, "F32");
    checkpoint.Set(name, 5, 20, bad);
    Write(checkpoint);
    EXPECT_TRUE(Load(config, 0, 2).ok());
    EXPECT_THAT(LoadError(config, absl::StatusCode::kDataLoss, 1, 2),
                HasSubstr("\"" + name + "\" at [5, 20] is NaN, infinite or too large"));
  }
}

TEST_F(LoadWeightsTest, AWeightTooLargeForBFloat16IsDataLoss) {
  const ModelConfig config = TinyModel();
  TestCheckpoint checkpoint(config, "F32");
  checkpoint.Set("model.norm.weight", 3, 0, std::numeric_limits<float>::max());
  Write(checkpoint);
  EXPECT_TRUE(Load(config, 0, 1, DType::kFloat32).ok());
  EXPECT_THAT(LoadError(config, absl::StatusCode::kDataLoss, 0, 1, DType::kBFloat16),
              HasSubstr("\"model.norm.weight\" at [3, 0]"));
}

TEST_F(LoadWeightsTest, ProgressRisesToOne) {
  const ModelConfig config = TinyModel();
  Write(TestCheckpoint(config, "BF16"));
  const auto folder = SafetensorsFolder::Open(folder_.path());
  std::vector<double> seen;
  LoadWeightsOptions options{.plan = ShardPlan::Make(config, 0, 2).value(),
                             .dtype = DType::kFloat32,
                             .progress = [&seen](double part) { seen.push_back(part); }};
  ASSERT_TRUE(LoadWeights(*folder, config, options, backend_).ok());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), 1.0);
}

TEST(LoadWeights, ReadsFoldersOfTransformers) {
  kernels::SerialExecutor executor;
  CpuBackend backend(executor);
  for (const char* name : {"/llama", "/llama-tied", "/llama-float16-sharded"}) {
    const std::string path = std::string(kTestData) + name;
    const auto config = LoadModelConfig(path);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto folder = SafetensorsFolder::Open(path);
    ASSERT_TRUE(folder.ok()) << folder.status();
    LoadWeightsOptions options{
        .plan = ShardPlan::Make(*config, 0, 1).value(), .dtype = DType::kBFloat16, .progress = {}};
    const auto weights = LoadWeights(*folder, *config, options, backend);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->lm_head.memory.data() == nullptr, config->tie_word_embeddings);
    EXPECT_EQ(weights->layers.size(), 2u);
  }
}

}  // namespace
}  // namespace kvasir::worker
