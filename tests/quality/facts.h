// What the methods rest on, counted on a model's own queries (docs/quality.md says what each is):
// how few chunks of tokens hold the heaviest keys; what the best blocks of some size keep; which
// token of a chunk stands best for it; how many bits a key needs for the top-p rule; how heads
// should vote. Used by the fidelity program. Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/executor.h"
#include "tests/quality/true_attention.h"
#include <nlohmann/json.hpp>

namespace kvasir::quality {

class Facts {
 public:
  // About selections of `numbers`.
  explicit Facts(const kernels::PolicyNumbers& numbers) : numbers_(numbers) {}

  void Add(const LayerAttention& layer);
  // What of it needs keys of few bits: dearer than all the rest, and one question shows it.
  void AddBits(const LayerAttention& layer, kernels::Executor& executor);
  nlohmann::json ToJson() const;

 private:
  static constexpr int64_t kChunkTokens = 64;

  // A mean over queries of what some tokens keep.
  struct Kept {
    double mass = 0, tokens = 0;
    int64_t queries = 0;

    void Add(double more_mass, int64_t more_tokens);
    nlohmann::json ToJson() const;
  };

  void CountOccupancy(const LayerAttention& layer);
  void CountBranches(const LayerAttention& layer);
  void KeepBestBlocks(const LayerAttention& layer);
  void CountOverlap(const LayerAttention& layer);
  void Vote(const LayerAttention& layer);
  void VoteAmong(const LayerAttention& layer, int64_t step, int64_t first_head, int64_t num_heads,
                 const std::string& scope);

  const kernels::PolicyNumbers numbers_;
  // Chunks by how many of their tokens are among the heaviest: of the budget, and of a 64th of the
  // context.
  std::map<std::string, std::array<int64_t, kChunkTokens + 1>> occupancy_;
  // Halvings of chunks that a token of each half decided rightly, by which token; of those that
  // hold one of the heaviest.
  std::map<std::string, int64_t> right_branches_;
  int64_t branches_ = 0;
  // Of the heaviest blocks of so many tokens, chosen for a KV group by the sum over its heads: no
  // selection of such blocks keeps more on average.
  std::map<int64_t, Kept> by_block_;
  // Of the heaviest pages for a KV group, at all steps but an answer's first: those that were among
  // them at the step before, and at any step before; and how alike two queries of a head are that
  // follow one another.
  struct Overlap {
    int64_t pages = 0, previous = 0, earlier = 0, queries = 0;
    double cosine = 0;
  } overlap_;
  std::map<int, Kept> by_bits_;                                   // of the keys
  std::map<std::pair<std::string, std::string>, Kept> by_votes_;  // by scope and way
};

}  // namespace kvasir::quality
