// The forward pass against logits that transformers computed with the same weights, from one rank
// to four.
#include "worker/model/transformer.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "tests/worker/model/golden.h"
#include "tests/worker/model/test_files.h"
#include "tests/worker/rank_group.h"
#include "tests/worker/test_coordinator.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

constexpr int64_t kChunk = 128;
// Share of the largest logit. Sums of float32 in another order differ by a tenth of it at 8,000
// tokens.
constexpr float kTolerance = 3e-4f;
// The same with KV of 8 bits. These models have random weights, and so no token that stands out.
constexpr float kFloat8Tolerance = 0.25f, kInt8Tolerance = 0.05f;

constexpr char kIfWeightsChanged[] =
    "; if the weights were changed, tests/model/make_golden_logits.py must be run again";

struct GoldenCase {
  std::string model;  // a folder of testdata, or of the reference models
  int ranks = 1;

  bool is_reference_model() const { return absl::StartsWith(model, "needle"); }
  std::string folder() const {
    return is_reference_model() ? absl::StrCat("tests/model/", model)
                                : absl::StrCat(kTestData, "/", model);
  }
  std::string golden() const {
    return is_reference_model() ? absl::StrCat("tests/model/golden/", model, ".safetensors")
                                : absl::StrCat(folder(), "/golden.safetensors");
  }
};

class TransformerGoldenTest : public testing::TestWithParam<GoldenCase> {
 protected:
  // The longest sequence is the run's own, because dynamic RoPE depends on it.
  static RankGroupOptions Options(const GoldenRun& run, DType dtype) {
    RankGroupOptions options = {.model = {.folder = GetParam().folder(),
                                          .dtype = dtype,
                                          .max_model_len = std::ssize(run.tokens),
                                          .edit_weights = {}},
                                .size = GetParam().ranks};
    options.engine.policies = {MakePolicy("all", "all")};  // requests name the first
    options.engine.kv_dtype = dtype;
    options.engine.max_num_seqs = 1;
    options.engine.max_num_batched_tokens = kChunk;
    options.engine.kv.device = options.engine.kv.host = 256 << 20;
    return options;
  }
};

class TransformerBFloat16Test : public TransformerGoldenTest {};
class TransformerQuantizedTest : public TransformerGoldenTest {};

// Logits at the run's positions. Each position is the end of a prompt of its own, because the
// engine gives logits only there; the prompt finds the previous one's blocks in the cache.
std::vector<TestWorker::Logits> ComputeLogits(RankGroup& group, const GoldenRun& run) {
  TestCoordinator coordinator({.chunk = kChunk, .keep_blocks = true});
  std::vector<TestWorker::Logits> logits;
  std::vector<uint64_t> blocks;
  for (const int64_t position : run.positions) {
    blocks.resize(std::min(blocks.size(), static_cast<size_t>(position / kernels::kPageTokens)));
    const size_t r =
        coordinator.Add({.prompt = {run.tokens.begin(), run.tokens.begin() + position + 1},
                         .max_tokens = 1,
                         .prefill = {},
                         .decode = {},
                         .sampling = Greedy(),
                         .cached_blocks = blocks});
    group.Run(coordinator);
    blocks = coordinator.result(r).blocks;
    logits.push_back(group.worker(0).logits().at({0, position}));
  }
  return logits;
}

TEST_P(TransformerGoldenTest, LogitsAgreeWithTransformers) {
  const GoldenFile golden(GetParam().golden());
  for (const int64_t length : golden.lengths()) {
    const GoldenRun run = golden.Run(length);
    RankGroup group(Options(run, DType::kFloat32));
    const std::vector<TestWorker::Logits> logits = ComputeLogits(group, run);
    LogitsDifference difference;
    for (size_t i = 0; i < logits.size(); ++i) difference.Add(run.logits[i], logits[i]);
    std::cout << length << " tokens: largest difference " << difference.largest
              << ", largest logit " << difference.scale << std::endl;
    EXPECT_LE(difference.largest, kTolerance * difference.scale)
        << length << " tokens" << kIfWeightsChanged;
  }
}

TEST_P(TransformerBFloat16Test, ChoosesTheSameTokens) {
  const GoldenFile golden(GetParam().golden());
  int64_t compared = 0;
  for (const int64_t length : golden.lengths()) {
    const GoldenRun run = golden.Run(length);
    RankGroup group(Options(run, DType::kBFloat16));
    const std::vector<TestWorker::Logits> logits = ComputeLogits(group, run);
    for (size_t i = 0; i < logits.size(); ++i) {
      if (TopTwoMargin(run.logits[i]) <= 0.1f) continue;
      ++compared;
      EXPECT_EQ(ArgMax(logits[i]), ArgMax(run.logits[i]))
          << "position " << run.positions[i] << " of " << length << kIfWeightsChanged;
    }
  }
  EXPECT_GT(compared, 30);
}

// With KV of 8 bits; the rest is float32, so the difference is what the codes cost.
TEST_P(TransformerQuantizedTest, LogitsAreWithinTheErrorOfTheCodes) {
  const GoldenFile golden(GetParam().golden());
  for (const int64_t length : golden.lengths()) {
    const GoldenRun run = golden.Run(length);
    float shares[2];
    for (const DType kv : {DType::kFloat8E4M3, DType::kInt8}) {
      RankGroupOptions options = Options(run, DType::kFloat32);
      options.engine.kv_dtype = kv;
      RankGroup group(options);
      const std::vector<TestWorker::Logits> logits = ComputeLogits(group, run);
      LogitsDifference difference;
      for (size_t i = 0; i < logits.size(); ++i) difference.Add(run.logits[i], logits[i]);
      float& share = shares[kv == DType::kInt8 ? 1 : 0];
      share = difference.largest / difference.scale;
      std::cout << length << " tokens, " << DTypeName(kv) << ": largest difference "
                << difference.largest << ", largest logit " << difference.scale << std::endl;
      EXPECT_LE(share, kv == DType::kInt8 ? kInt8Tolerance : kFloat8Tolerance);
      EXPECT_GT(share, kTolerance) << "the KV is not coded";
    }
    EXPECT_LT(shares[1], shares[0]) << "int8 has the finer codes";
  }
}

std::string NameOf(const testing::TestParamInfo<GoldenCase>& test) {
  std::string name = test.param.model;
  std::replace(name.begin(), name.end(), '-', '_');
  return absl::StrCat(name, "_", test.param.ranks);
}

const auto kOnOneRank = testing::Values(
    GoldenCase{"llama"}, GoldenCase{"llama-linear"}, GoldenCase{"llama-dynamic"},
    GoldenCase{"llama-yarn"}, GoldenCase{"llama3"}, GoldenCase{"llama-tied"},
    GoldenCase{"llama-bias"}, GoldenCase{"llama-float16-sharded"}, GoldenCase{"qwen2"},
    GoldenCase{"qwen2-yarn"}, GoldenCase{"qwen3"}, GoldenCase{"qwen3-tied"},
    GoldenCase{"mistral-window"}, GoldenCase{"qwen2-window"}, GoldenCase{"qwen3-window"});
INSTANTIATE_TEST_SUITE_P(OneRank, TransformerGoldenTest, kOnOneRank, NameOf);
INSTANTIATE_TEST_SUITE_P(OneRank, TransformerBFloat16Test, kOnOneRank, NameOf);

const auto kReference = testing::Values(GoldenCase{"needle-8k"}, GoldenCase{"needle-32k"});
INSTANTIATE_TEST_SUITE_P(Reference, TransformerGoldenTest, kReference, NameOf);
INSTANTIATE_TEST_SUITE_P(Reference, TransformerBFloat16Test, kReference, NameOf);
INSTANTIATE_TEST_SUITE_P(Quantized, TransformerQuantizedTest,
                         testing::Values(GoldenCase{"llama"}, GoldenCase{"qwen3"},
                                         GoldenCase{"mistral-window"}, GoldenCase{"llama", 2},
                                         GoldenCase{"qwen3", 4}),
                         NameOf);

// Each has 2 KV heads: on four ranks, two share one.
INSTANTIATE_TEST_SUITE_P(Ranks, TransformerGoldenTest,
                         testing::Values(GoldenCase{"llama", 2}, GoldenCase{"llama-bias", 2},
                                         GoldenCase{"qwen2", 2}, GoldenCase{"qwen3-tied", 2},
                                         GoldenCase{"llama", 4}, GoldenCase{"llama-tied", 4},
                                         GoldenCase{"qwen2", 4}, GoldenCase{"qwen3", 4},
                                         GoldenCase{"mistral-window", 2},
                                         GoldenCase{"qwen2-window", 4}),
                         NameOf);

}  // namespace
}  // namespace kvasir::worker
