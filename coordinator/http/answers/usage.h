// Adds up what the sequences of one HTTP answer used, and tells it as OpenAI's `usage` with two
// parts of ours: cached tokens by tier, and what attention skipped. Belongs to one thread at a
// time.
#pragma once

#include <cstdint>

#include "nlohmann/json.hpp"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class UsageSum {
 public:
  // Adds a prompt that is being read. Several answers to one prompt read it once.
  void AddPrompt(const v1::Progress& progress) { prompt_tokens_ += progress.prompt_tokens(); }
  void AddTokens(int64_t tokens) { completion_tokens_ += tokens; }
  void AddFinish(const v1::Finish& finish);

  // {prompt_tokens, completion_tokens, total_tokens}, and when `finished` also
  //   prompt_tokens_details: {cached_tokens, cached_tokens_by_tier: {device, host, disk}}
  //   kvasir: {sparsity, blocks_skipped, mass}: the share and the number of pages that attention
  //     did not read, and the share of attention mass that decoding kept: 1 where it was dense,
  //     null where it was not measured.
  enum class State { kRunning, kFinished };
  nlohmann::json Json(State state) const;

 private:
  int64_t prompt_tokens_ = 0;
  int64_t completion_tokens_ = 0;
  v1::CachedTokens cached_;
  uint64_t blocks_ = 0;
  uint64_t blocks_skipped_ = 0;
  double mass_ = 0;  // times samples
  uint64_t mass_samples_ = 0;
  bool mass_unknown_ = false;  // of a sequence
};

}  // namespace kvasir::coordinator
