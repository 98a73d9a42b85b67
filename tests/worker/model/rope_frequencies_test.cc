#include "worker/checkpoint/rope_frequencies.h"

#include <cmath>
#include <gtest/gtest.h>

#include "tests/worker/model/test_files.h"
#include <nlohmann/json.hpp>

namespace kvasir::worker {
namespace {

using nlohmann::json;

// transformers computes in float32; powers of large bases lose a few of its last bits.
constexpr double kRelativeTolerance = 3e-6;

ModelConfig ConfigOf(const json& fields) {
  const auto config = ParseModelConfig(fields.dump(), "");
  EXPECT_TRUE(config.ok()) << config.status() << fields;
  return config.value_or(ModelConfig{});
}

json Merged(json base, const json& fields) {
  base.update(fields);
  return base;
}

TEST(RopeFrequencies, AgreeWithTransformers) {
  const json golden = json::parse(ReadFile(std::string(kTestData) + "/rope_golden.json"));
  ASSERT_GE(golden["cases"].size(), 20u);
  for (const auto& [name, expected] : golden["cases"].items()) {
    const ModelConfig config = ConfigOf(Merged(golden["base"], expected["fields"]));
    const RopeFrequencies rope = ComputeRopeFrequencies(config, expected["context_length"]);
    ASSERT_EQ(rope.inv_freq.size(), expected["inv_freq"].size()) << name;
    EXPECT_NEAR(rope.attention_factor, expected["attention_factor"].get<double>(), 1e-12) << name;
    for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
      const double value = expected["inv_freq"][i];
      EXPECT_NEAR(rope.inv_freq[i], value, kRelativeTolerance * value) << name << " at " << i;
    }
  }
}

TEST(RopeFrequencies, DynamicDependsOnTheContextOnlyBeyondTheTrainedLength) {
  const json golden = json::parse(ReadFile(std::string(kTestData) + "/rope_golden.json"));
  const json scaling = {{"rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}}}};
  const ModelConfig config = ConfigOf(Merged(golden["base"], scaling));
  const auto plain = ComputeRopeFrequencies(ConfigOf(golden["base"]), 1);
  EXPECT_EQ(ComputeRopeFrequencies(config, 1).inv_freq, plain.inv_freq);
  EXPECT_EQ(ComputeRopeFrequencies(config, config.max_position_embeddings).inv_freq,
            plain.inv_freq);
  EXPECT_NE(ComputeRopeFrequencies(config, config.max_position_embeddings + 1).inv_freq,
            plain.inv_freq);
}

// Every combination of parameters at the edges of their ranges gives finite, positive angles of at
// most one radian a position.
TEST(RopeFrequencies, AreFiniteAtTheEdgesOfAllRanges) {
  for (const RopeKind kind : {RopeKind::kPlain, RopeKind::kLinear, RopeKind::kDynamicNtk,
                              RopeKind::kYarn, RopeKind::kLlama3}) {
    for (const int64_t head_dim : {4, 6, 512}) {
      for (const double theta : {2.0, 1e15}) {
        for (const double factor : {1.0, 1e6}) {
          for (const int64_t positions : {int64_t{1}, int64_t{1} << 30}) {
            for (const bool wide : {false, true}) {
              ModelConfig config;
              config.head_dim = head_dim;
              config.max_position_embeddings = positions;
              config.rope = {.kind = kind,
                             .theta = theta,
                             .factor = factor,
                             .original_max_position_embeddings = positions,
                             .attention_factor = {},
                             .mscale = wide ? 1e3 : 0.0,
                             .mscale_all_dim = 1e3,
                             .beta_fast = wide ? 1e6 : 0.0011,
                             .beta_slow = 0.001,
                             .truncate = wide,
                             .low_freq_factor = 0.001,
                             .high_freq_factor = wide ? 1e6 : 0.0011};
              const auto rope = ComputeRopeFrequencies(config, int64_t{1} << 30);
              EXPECT_TRUE(std::isfinite(rope.attention_factor) && rope.attention_factor > 0);
              for (const double frequency : rope.inv_freq) {
                EXPECT_TRUE(frequency > 0 && frequency <= 1.0)
                    << RopeKindName(kind) << " " << head_dim << " " << theta << " " << factor;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::worker
