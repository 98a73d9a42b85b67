// Sampling on the GPU against the CPU: equal in all bits, statuses included.
#include "kernels/sampling/sampling_cuda.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/device_buffer.h"
#include "kernels/base/executor.h"
#include "tests/kernels/dense/sampling_case.h"
#include "tests/support/device_memory.h"

namespace kvasir::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kHuge = std::numeric_limits<float>::max();

// Rows of one launch, and the places of their top logprobs on either side.
class Rows {
 public:
  explicit Rows(int64_t vocab) : vocab_(vocab) {}

  void Add(const std::vector<float>& logits, const SamplingOptions& options, size_t num_top = 0) {
    logits_.insert(logits_.end(), logits.begin(), logits.end());
    expected_.push_back(options);
    found_.push_back(options);
    expected_.back().top = top_.emplace_back(num_top);
    found_.back().top = top_.emplace_back(num_top);
  }

  void ExpectEqualResults() {
    const std::vector<SampledToken> expected = OnCpu(), found = OnGpu();
    for (size_t r = 0; r < expected.size(); ++r) {
      SCOPED_TRACE(testing::Message() << "row " << r << " of " << vocab_);
      EXPECT_EQ(found[r].status, expected[r].status);
      EXPECT_EQ(found[r].token, expected[r].token);
      EXPECT_EQ(found[r].logprob, expected[r].logprob);
      for (size_t i = 0; i < expected_[r].top.size(); ++i) {
        EXPECT_EQ(found_[r].top[i].token, expected_[r].top[i].token) << i;
        EXPECT_EQ(found_[r].top[i].logprob, expected_[r].top[i].logprob) << i;
      }
      ++tokens_[expected[r].token];
    }
  }
  // Number of different tokens that were sampled.
  size_t num_tokens() const { return tokens_.size(); }

 private:
  TensorView View(void* data, Device device) const {
    return TensorView(data, DType::kFloat32, {std::ssize(expected_), vocab_}, device);
  }

  std::vector<SampledToken> OnCpu() {
    SerialExecutor executor;
    const HostBuffer scratch = HostBuffer::Allocate(SamplingScratchBytes(vocab_, 1)).value();
    std::vector<SampledToken> tokens(expected_.size());
    EXPECT_TRUE(Sample({.logits = View(logits_.data(), Device::kCpu),
                        .options = expected_,
                        .tokens = tokens,
                        .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
                       executor)
                    .ok());
    return tokens;
  }

  std::vector<SampledToken> OnGpu() {
    DeviceMemory memory;
    float* const logits = memory.Copy(logits_.data(), logits_.size()).value();
    // Memory left from earlier use belongs to no row.
    const std::vector<float> poison(logits_.size(), kNan);
    float* const changed = memory.Copy(poison.data(), poison.size()).value();
    const PinnedBuffer block = PinnedBuffer::Allocate(SamplingBlockBytes(found_, vocab_)).value();
    std::fill_n(block.data(), block.size_bytes(), std::byte{0xA5});
    FillSamplingBlock(found_, vocab_, block.data());
    const absl::Status status = Sample({.logits = View(logits, Device::kCuda),
                                        .block = block.data(),
                                        .block_rows = std::ssize(found_),
                                        .changed = ChangesLogits(found_) ? changed : nullptr},
                                       nullptr);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<SampledToken> tokens(found_.size());
    ReadSamplingBlock(found_, vocab_, block.data(), tokens);
    std::vector<float> after(logits_.size());
    EXPECT_TRUE(DeviceMemory::Fetch(logits, after.data(), after.size() * sizeof(float)).ok());
    EXPECT_EQ(std::memcmp(after.data(), logits_.data(), after.size() * sizeof(float)), 0)
        << "the logits were changed";
    return tokens;
  }

  const int64_t vocab_;
  std::vector<float> logits_;
  std::vector<SamplingOptions> expected_, found_;
  std::list<std::vector<TokenLogprob>> top_;
  std::map<int32_t, int> tokens_;
};

class SamplingCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
};

std::vector<float> NormalLogits(int64_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& logit : logits) logit = normal(random);
  return logits;
}

TEST_F(SamplingCudaTest, GreedyTakesTheLargestAndTheSmallerIdAmongEquals) {
  for (const int64_t vocab : {1, 2, 31, 1000, 1024, 5000, 128259}) {
    const auto last = static_cast<size_t>(vocab - 1), third = static_cast<size_t>(vocab / 3);
    Rows rows(vocab);
    std::vector<float> logits = NormalLogits(vocab, 1);
    rows.Add(logits, {});
    logits[last] = 1000;
    rows.Add(logits, {.wants_logprob = false});
    logits[third] = 1000;
    rows.Add(logits, {});
    rows.Add(std::vector<float>(logits.size(), 0.25f), {});
    std::vector<float> zeros(logits.size(), -0.0f);
    zeros[last] = 0.0f;  // not larger than -0
    rows.Add(zeros, {});
    logits[third] = -kHuge;
    logits[last] = kHuge;
    rows.Add(logits, {});
    rows.ExpectEqualResults();
  }
}

TEST_F(SamplingCudaTest, EveryMixOfOptionsDrawsWhatTheCpuDraws) {
  for (const int64_t vocab : {2, 61, 1024, 4099}) {
    std::list<RandomSamplingCase> cases;
    Rows rows(vocab);
    const uint32_t count = vocab > 1000 ? 60 : 400;
    for (uint32_t seed = 0; seed < count; ++seed) {
      const RandomSamplingCase& c = cases.emplace_back(seed, vocab);
      rows.Add(c.logits, c.options, seed % 3 == 0 ? seed % 23 : 0);
    }
    rows.ExpectEqualResults();
    EXPECT_GT(rows.num_tokens(), vocab > 2 ? 15u : 1u);
  }
}

TEST_F(SamplingCudaTest, DrawsFromAVocabularyOfAModelWhatTheCpuDraws) {
  const std::vector<int32_t> seen = {5, 77, 5, 128258, 40000, 5}, banned = {0, 64000};
  const std::vector<TokenBias> biases = {{.token = 7, .bias = 9.5f}, {.token = 77, .bias = -3}};
  const SamplingOptions options[] = {
      {.temperature = 1},
      {.temperature = 1.5f, .top_k = 50},
      {.temperature = 0.7f, .top_p = 0.95f},
      {.temperature = 2, .top_k = 1000, .top_p = 0.9f, .min_p = 0.001f},
      {.temperature = 1, .min_p = 0.05f},
      {.temperature = 1, .top_k = 128259},
      {.temperature = 1, .top_k = 128258, .banned = banned},
      {.temperature = 1,
       .top_p = 0.99f,
       .banned = banned,
       .biases = biases,
       .repetition_penalty = 1.2f,
       .frequency_penalty = 0.3f,
       .presence_penalty = 0.1f,
       .prompt = seen,
       .output = seen}};
  Rows rows(128259);
  uint32_t seed = 0;
  for (SamplingOptions row : options) {
    for (row.seed = 0; row.seed < 3; ++row.seed) {
      row.position = 100 + seed;
      rows.Add(NormalLogits(128259, ++seed), row, row.seed == 1 ? 20 : 0);
    }
  }
  rows.ExpectEqualResults();
  EXPECT_GT(rows.num_tokens(), 12u);
}

// Thresholds among more logits than are listed: close together, far from the largest, or equal to
// each other.
TEST_F(SamplingCudaTest, ThresholdsAreFoundHoweverTheLogitsLie) {
  constexpr int64_t kVocab = 20001;
  Rows rows(kVocab);
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const std::vector<float> normal = NormalLogits(kVocab, seed);
    std::vector<float> wide = normal, plateau = normal;
    for (float& logit : wide) logit *= 1000;
    for (size_t i = 0; i < plateau.size(); i += 2) plateau[i] = 0.5f;
    const auto options = [&](float temperature, int64_t top_k, float top_p) {
      return SamplingOptions{
          .temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = seed};
    };
    rows.Add(normal, options(1000, 0, 0.5f));
    rows.Add(normal, options(1, 15000, 0.9999f), 1000);
    rows.Add(wide, options(3000, 12000, 0.99f), 1000);
    rows.Add(wide, options(1, 3, 0.9f));
    rows.Add(plateau, options(5, 0, 0.7f), 1000);
    rows.Add(plateau, options(1, 9000, 0.999f), 10000);
  }
  rows.ExpectEqualResults();
  EXPECT_GT(rows.num_tokens(), 12u);
}

TEST_F(SamplingCudaTest, EqualLogitsAreKeptInOrderOfId) {
  for (const int64_t vocab : {7, 2048, 5001}) {
    Rows rows(vocab);
    const std::vector<float> equal(static_cast<size_t>(vocab), 2);
    for (int64_t position = 0; position < 20; ++position) {
      rows.Add(equal, {.temperature = 1, .top_p = 0.5f, .position = position}, 5);
      rows.Add(equal, {.temperature = 1, .top_k = 2, .top_p = 0.1f, .position = position});
    }
    rows.ExpectEqualResults();
  }
}

TEST_F(SamplingCudaTest, ExtremeTemperaturesAndLogitsAreTheCpus) {
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  Rows rows(4);
  rows.Add({1, 2, 1.999f, -kHuge}, {.temperature = kTiny}, 9);
  rows.Add({-kHuge, kHuge, 0, 0}, {.temperature = 1}, 4);
  rows.Add({-kHuge, -kHuge, -kHuge, -kHuge}, {.temperature = 1});
  rows.Add({0, 80, kTiny, -kTiny}, {.temperature = kHuge, .top_p = 0.6f}, 2);
  rows.Add({kHuge, kHuge, kHuge, kHuge}, {.temperature = 1, .top_p = 0.9f}, 3);
  const std::vector<int32_t> often(100000, 1);
  rows.Add({0, 1, 1, 1}, {.frequency_penalty = kHuge, .output = often});
  rows.ExpectEqualResults();
}

TEST_F(SamplingCudaTest, WhatFailsFailsItsRowOnlyWithTheCpusStatus) {
  for (const int64_t vocab : {5, 3000}) {
    const std::vector<float> good = NormalLogits(vocab, 3);
    std::vector<int32_t> all(static_cast<size_t>(vocab));
    for (int32_t id = 0; id < static_cast<int32_t>(vocab); ++id) all[static_cast<size_t>(id)] = id;
    const std::vector<int32_t> outside = {static_cast<int32_t>(vocab)};
    Rows rows(vocab);
    for (const float bad : {kNan, kInf, -kInf, -kNan}) {
      std::vector<float> logits = good;
      logits[static_cast<size_t>(vocab - 1)] = kNan;
      logits[static_cast<size_t>(vocab / 2)] = bad;
      rows.Add(logits, {.temperature = 1}, 3);
      rows.Add(good, {.temperature = 1}, 3);
    }
    rows.Add(good, {.temperature = 1, .banned = all});
    rows.Add(good, {.temperature = -1});
    rows.Add(good, {.banned = outside});
    rows.Add(good, {.repetition_penalty = 2, .prompt = outside});
    rows.Add(good, {.temperature = 1}, 3);
    rows.ExpectEqualResults();
  }
}

TEST_F(SamplingCudaTest, ABlockFilledAnewServesTheSameLaunch) {
  constexpr int64_t kVocab = 3000;
  std::vector<float> logits = NormalLogits(kVocab, 5);
  DeviceMemory memory;
  const TensorView view(memory.Copy(logits.data(), logits.size()).value(), DType::kFloat32,
                        {1, kVocab}, Device::kCuda);
  float* const changed = memory.Copy(logits.data(), logits.size()).value();
  const std::vector<int32_t> banned = {0, 1, 2};
  const SamplingOptions options[] = {
      {}, {.temperature = 1, .top_p = 0.9f, .seed = 3}, {.temperature = 1, .banned = banned}};
  const PinnedBuffer block = PinnedBuffer::Allocate(4096).value();
  for (const SamplingOptions& row : options) {
    const std::span<const SamplingOptions> rows(&row, 1);
    ASSERT_LE(SamplingBlockBytes(rows, kVocab), block.size_bytes());
    FillSamplingBlock(rows, kVocab, block.data());
    ASSERT_TRUE(Sample({.logits = view, .block = block.data(), .block_rows = 1, .changed = changed},
                       nullptr)
                    .ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    SampledToken found, expected;
    ReadSamplingBlock(rows, kVocab, block.data(), {&found, 1});
    SerialExecutor executor;
    const HostBuffer scratch = HostBuffer::Allocate(SamplingScratchBytes(kVocab, 1)).value();
    ASSERT_TRUE(Sample({.logits = TensorView(logits.data(), DType::kFloat32, {1, kVocab}),
                        .options = rows,
                        .tokens = {&expected, 1},
                        .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
                       executor)
                    .ok());
    EXPECT_EQ(found.token, expected.token);
    EXPECT_EQ(found.logprob, expected.logprob);
  }
}

// Tokens of a prompt are scored in groups of rows, whose requests lie in one block.
TEST_F(SamplingCudaTest, RowsOfABlockAreSampledInGroups) {
  constexpr int64_t kVocab = 5000, kRows = 7, kGroup = 3, kTop = 5;
  DeviceMemory memory;
  std::vector<float> logits;
  std::vector<TokenLogprob> found_top(kRows * kTop), expected_top(kRows * kTop);
  std::vector<SamplingOptions> asked, expected;
  for (int64_t r = 0; r < kRows; ++r) {
    const std::vector<float> row = NormalLogits(kVocab, static_cast<uint32_t>(r));
    logits.insert(logits.end(), row.begin(), row.end());
    const auto given = static_cast<int32_t>(r * 101 % kVocab);
    const auto top = static_cast<size_t>(r * kTop);
    asked.push_back({.given = given, .top = std::span(found_top).subspan(top, kTop)});
    expected.push_back({.given = given, .top = std::span(expected_top).subspan(top, kTop)});
  }
  EXPECT_FALSE(ChangesLogits(asked));
  float* const on_device = memory.Copy(logits.data(), logits.size()).value();
  const PinnedBuffer block = PinnedBuffer::Allocate(SamplingBlockBytes(asked, kVocab)).value();
  FillSamplingBlock(asked, kVocab, block.data());
  for (int64_t first = 0; first < kRows; first += kGroup) {
    const TensorView group(on_device + first * kVocab, DType::kFloat32,
                           {std::min(kGroup, kRows - first), kVocab}, Device::kCuda);
    ASSERT_TRUE(
        Sample({.logits = group, .block = block.data(), .block_rows = kRows, .first_row = first},
               nullptr)
            .ok());
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<SampledToken> found(kRows), on_cpu(kRows);
  ReadSamplingBlock(asked, kVocab, block.data(), found);
  SerialExecutor executor;
  const HostBuffer scratch = HostBuffer::Allocate(SamplingScratchBytes(kVocab, 1)).value();
  ASSERT_TRUE(Sample({.logits = TensorView(logits.data(), DType::kFloat32, {kRows, kVocab}),
                      .options = expected,
                      .tokens = on_cpu,
                      .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
                     executor)
                  .ok());
  for (size_t r = 0; r < kRows; ++r) {
    EXPECT_EQ(found[r].token, on_cpu[r].token);
    EXPECT_EQ(found[r].logprob, on_cpu[r].logprob);
  }
  for (size_t i = 0; i < found_top.size(); ++i) {
    EXPECT_EQ(found_top[i].token, expected_top[i].token) << i;
    EXPECT_EQ(found_top[i].logprob, expected_top[i].logprob) << i;
  }
}

TEST_F(SamplingCudaTest, RefusesWhatIsNotASamplingOnTheDevice) {
  float logits[6] = {};
  DeviceSamplingParams params = {
      .logits = TensorView(logits, DType::kFloat32, {2, 3}), .block = nullptr, .block_rows = 2};
  EXPECT_EQ(Sample(params, nullptr).code(), absl::StatusCode::kInvalidArgument) << "host memory";
  params.logits = TensorView(logits, DType::kFloat32, {2, 0}, Device::kCuda);
  EXPECT_EQ(Sample(params, nullptr).code(), absl::StatusCode::kInvalidArgument) << "no vocabulary";
  params.logits = TensorView(logits, DType::kInt32, {2, 3}, Device::kCuda);
  EXPECT_EQ(Sample(params, nullptr).code(), absl::StatusCode::kInvalidArgument) << "dtype";
  params.logits = TensorView(nullptr, DType::kFloat32, {0, 3}, Device::kCuda);
  EXPECT_TRUE(Sample(params, nullptr).ok());
}

}  // namespace
}  // namespace kvasir::kernels
