// Input: config.json, then, behind a NUL byte, generation_config.json. A config that is accepted
// must have sound frequencies and divide over one rank.
#include <cmath>
#include <cstdint>

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/rope_frequencies.h"
#include "worker/checkpoint/shard_plan.h"

namespace kvasir::worker {
namespace {

void CheckConfig(absl::string_view input) {
  const size_t nul = input.find('\0');
  const absl::string_view generation =
      nul == absl::string_view::npos ? absl::string_view() : input.substr(nul + 1);
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(input.substr(0, nul), generation);
  if (!config.ok()) {
    KVASIR_CHECK(config.status().message().size() < 600);
    return;
  }
  KVASIR_CHECK(ShardPlan::Make(*config, 0, 1).ok());
  for (const int64_t rank_count : {2, 3, 8, 64}) {
    ShardPlan::Make(*config, rank_count - 1, rank_count).IgnoreError();
  }
  for (const int64_t context_length : {int64_t{1}, int64_t{1} << 30}) {
    const RopeFrequencies rope = ComputeRopeFrequencies(*config, context_length);
    KVASIR_CHECK(std::isfinite(rope.attention_factor) && rope.attention_factor > 0);
    KVASIR_CHECK(static_cast<int64_t>(rope.inv_freq.size()) == config->head_dim / 2);
    for (const double f : rope.inv_freq) KVASIR_CHECK(f > 0 && f <= 1);
  }
}

}  // namespace
}  // namespace kvasir::worker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::worker::CheckConfig({reinterpret_cast<const char*>(data), size});
  return 0;
}
