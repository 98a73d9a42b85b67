#include "worker/checkpoint/model_hash.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <set>

#include "tests/support/thread_executor.h"
#include "tests/worker/model/test_checkpoint.h"
#include "tests/worker/model/test_files.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

class HashModelTest : public testing::Test {
 protected:
  ModelHash Hash(const ModelConfig& config, int64_t context_length = 128,
                 DType dtype = DType::kBFloat16,
                 kernels::WeightForm weights = kernels::WeightForm::kAsInput) {
    const auto folder = SafetensorsFolder::Open(folder_.path());
    EXPECT_TRUE(folder.ok()) << folder.status();
    const auto hash = HashModel(
        *folder,
        {.config = config, .context_length = context_length, .dtype = dtype, .weights = weights},
        executor_);
    EXPECT_TRUE(hash.ok()) << hash.status();
    return *hash;
  }
  void Write(const std::string& bytes) { WriteFile(folder_.File("model.safetensors"), bytes); }

  TemporaryFolder folder_;
  tests::ThreadExecutor executor_{3};
};

TEST_F(HashModelTest, EveryByteOfTheFileCounts) {
  ModelConfig config = TinyModel();
  config.num_layers = 1;
  const std::string whole = SafetensorsBytes(TestCheckpoint(config, "BF16").tensors());
  std::set<ModelHash> hashes;
  Write(whole);
  hashes.insert(Hash(config));
  int num_changes = 0;
  for (size_t i = 8 + whole.rfind('}'); i < whole.size(); i += 61) {
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    Write(changed);
    hashes.insert(Hash(config));
    ++num_changes;
  }
  std::string renamed = whole;
  renamed.replace(renamed.find("lm_head"), 7, "mm_head");
  Write(renamed);
  hashes.insert(Hash(config));
  EXPECT_EQ(static_cast<int>(hashes.size()), num_changes + 2);
  EXPECT_GT(num_changes, 50);
}

TEST_F(HashModelTest, TheLastByteOfALargeFileCounts) {
  TestTensor large{"large", "U8", {9'000'000}, std::string(9'000'000, 'x')};
  Write(SafetensorsBytes({large}));
  const ModelHash hash = Hash(TinyModel());
  large.data.back() = 'y';
  Write(SafetensorsBytes({large}));
  EXPECT_NE(Hash(TinyModel()), hash);
}

TEST_F(HashModelTest, ThreadsDoNotCount) {
  const TestTensor large{"large", "U8", {30'000'001}, std::string(30'000'001, 'x')};
  Write(SafetensorsBytes({large}));
  const ModelConfig config = TinyModel();
  const auto folder = SafetensorsFolder::Open(folder_.path());
  kernels::SerialExecutor one;
  EXPECT_EQ(HashModel(*folder, {.config = config, .context_length = 128}, one).value(),
            Hash(config));
}

TEST_F(HashModelTest, EverythingThatKvDependsOnCounts) {
  const ModelConfig base = TinyModel();
  Write(SafetensorsBytes(TestCheckpoint(base, "BF16").tensors()));
  std::vector<ModelConfig> configs(20, base);
  configs[1].family = ModelFamily::kQwen3;
  configs[2].num_layers = 1;
  configs[3].num_kv_heads = 4;
  configs[4].head_dim = 8;
  configs[5].rms_norm_eps = 1e-6;
  configs[6].qkv_bias = true;
  configs[7].qk_norm = true;
  configs[8].rope.kind = RopeKind::kLinear;
  configs[9].rope.theta = 5e5;
  configs[10].rope.factor = 2.0;
  configs[11].rope.original_max_position_embeddings = 64;
  configs[12].rope.attention_factor = 1.5;
  configs[13].rope.beta_fast = 16.0;
  configs[14].rope.truncate = false;
  configs[15].rope.high_freq_factor = 8.0;
  configs[16].output_bias = true;
  configs[17].layer_windows = {97, 97};
  configs[18].layer_windows = {97, 0};
  configs[19].layer_windows = {0, 97};
  std::set<ModelHash> hashes;
  for (const ModelConfig& config : configs) hashes.insert(Hash(config));
  EXPECT_EQ(hashes.size(), configs.size());
  hashes.insert(Hash(base, 128, DType::kFloat32));
  EXPECT_EQ(hashes.size(), configs.size() + 1);
  hashes.insert(Hash(base, 128, DType::kBFloat16, kernels::WeightForm::kInt8));
  EXPECT_EQ(hashes.size(), configs.size() + 2);
}

TEST_F(HashModelTest, NothingElseCounts) {
  ModelConfig config = TinyModel();
  const std::string bytes = SafetensorsBytes(TestCheckpoint(config, "BF16").tensors());
  Write(bytes);
  const ModelHash hash = Hash(config);
  config.eos_token_ids = {1, 2};
  config.max_position_embeddings = 4096;
  EXPECT_EQ(Hash(config, 4096), hash);
  const TemporaryFolder copy;
  WriteFile(copy.File("model.safetensors"), bytes);
  const auto folder = SafetensorsFolder::Open(copy.path());
  EXPECT_EQ(HashModel(*folder, {.config = config, .context_length = 128}, executor_).value(), hash);
}

TEST_F(HashModelTest, TheContextCountsWhereFrequenciesDependOnIt) {
  ModelConfig config = TinyModel();
  config.rope.kind = RopeKind::kDynamicNtk;
  Write(SafetensorsBytes(TestCheckpoint(config, "BF16").tensors()));
  EXPECT_EQ(Hash(config, 1), Hash(config, 128));
  EXPECT_NE(Hash(config, 129), Hash(config, 128));
}

TEST_F(HashModelTest, AFileThatShrinksIsDataLoss) {
  Write(SafetensorsBytes(TestCheckpoint(TinyModel(), "BF16").tensors()));
  const auto folder = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(folder.ok());
  const std::string path = folder_.File("model.safetensors");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_EQ(
      HashModel(*folder, {.config = TinyModel(), .context_length = 128}, executor_).status().code(),
      absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace kvasir::worker
