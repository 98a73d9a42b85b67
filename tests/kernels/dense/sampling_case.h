// Rows of logits with all kinds of options, drawn from a seed, for the tests of sampling.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/sampling/sampling.h"

namespace kvasir::kernels {

class RandomSamplingCase {
 public:
  // Logits are multiples of 1 / 37, so that many are equal. `vocab` 0 gives a vocabulary of 2 to
  // 61.
  explicit RandomSamplingCase(uint32_t seed, int64_t vocab = 0)
      : random_(seed), logits(static_cast<size_t>(vocab > 0 ? vocab : Below(60) + 2)) {
    for (float& logit : logits) logit = static_cast<float>(Below(400)) / 37.0f - 5;
    options.temperature = std::vector<float>{0, 0.3f, 1, 2}[static_cast<size_t>(Below(4))];
    if (Below(2) == 0) options.top_k = Below(20);
    if (Below(2) == 0) options.top_p = static_cast<float>(Below(99) + 1) / 100.13f;
    if (Below(2) == 0) options.min_p = static_cast<float>(Below(100)) / 113.7f;
    if (Below(2) == 0) options.repetition_penalty = 0.25f + static_cast<float>(Below(200)) / 100;
    if (Below(2) == 0) options.frequency_penalty = static_cast<float>(Below(400)) / 100 - 2;
    if (Below(2) == 0) options.presence_penalty = static_cast<float>(Below(400)) / 100 - 2;
    for (int64_t n = Below(3) * 40; n > 0; --n) prompt_.push_back(AnyToken());
    for (int64_t n = Below(3) * 20; n > 0; --n) output_.push_back(AnyToken());
    for (int32_t id = 0; id < static_cast<int32_t>(logits.size()); ++id) {
      if (Below(10) == 0) {
        biases_.push_back({.token = id, .bias = static_cast<float>(Below(200)) / 10 - 10});
      }
      if (id > 0 && Below(10) == 0) banned_.push_back(id);  // one token is always left
    }
    options.prompt = prompt_;
    options.output = output_;
    options.biases = biases_;
    options.banned = banned_;
    options.seed = seed;
    options.position = Below(1000);
  }
  RandomSamplingCase(const RandomSamplingCase&) = delete;
  RandomSamplingCase& operator=(const RandomSamplingCase&) = delete;

 private:
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int32_t AnyToken() { return static_cast<int32_t>(Below(static_cast<int64_t>(logits.size()))); }

  std::mt19937 random_;
  std::vector<int32_t> prompt_, output_, banned_;
  std::vector<TokenBias> biases_;

 public:
  std::vector<float> logits;
  SamplingOptions options;
};

}  // namespace kvasir::kernels
