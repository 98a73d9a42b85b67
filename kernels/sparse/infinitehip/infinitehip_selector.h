// The selector `infinitehip` (InfiniteHiP, arXiv 2502.08910): three stages of pruning, each of
// which keeps the best chunks of those that the stage before it left.
//
//   stage 1    all chunks [sink_end + j c1, + c1) that begin at or before first - Wm
//   stage i    score of a chunk = max over the heads of the group of its representative's logit;
//              keep the K_i / c_i chunks of the largest scores, whole, later ones first among
//              equals
//   next       every kept chunk is split into chunks of c_(i+1) tokens; after the last stage, they
//              are the list
//
//   option preset     c1   K1      c2   K2      c3   K3             query rows averaged
//     "3k" (default)  256  32,768  32   8,192   8    budget_tokens  by 4, 4, 1
//     "5k"            64   32,768  32   16,384  16   budget_tokens  by 4, 4, 1
//     "3k-fast", "3k-flash": as 3k
//
// Where lists are reused the stages run every 16, 8 and 4 steps (3k, 5k), 32, 16 and 8 (3k-fast) or
// 96, 24 and 8 (3k-flash). A row remembers what stages 1 and 2 left.
//
// K1 and K2 are at least the budget. Wm = window_tokens - max(c1, 64): a list covers the tokens
// that leave the window for at least 64 steps, and entries may reach into the window. No key at or
// after the tile's first query is read, which needs a window of c1 + max(c1, 64) tokens
// (MinWindowTokens).
//
//   option probe      the score of a chunk, for one head; rows are the tile's queries, averaged
//     "digest" (default)  stage 1: the largest page bound (Quest's) of the pages it touches; later:
//                     the largest estimate from key codes of its tokens. Reads no key.
//     "centre"        descend log2(c) times into the half whose centre key has the larger logit
//                     (the right one among equals); the largest logit met. At c <= 8 the largest of
//                     all.
//     "first"         the paper's: descend into the half whose first key has the larger logit; the
//                     logit of the token that is left.
//
//   option scope      the heads over which a chunk's score is the largest: "group" (default) those
//                     of a KV group, which then has its own list; "layer" all, as in the paper.
//
// Where keys are cached un-rotated, chunks are judged at positions of the method's own:
//
//   layers 0 to 2     chunk-indexed: of n chunks that a stage begins with, the query at n - 1 + Wm,
//                     all keys of chunk c at c
//   the others        relative: the query at Wm + 1, a left probe at 0, a right one, a page bound
//                     and any other key at 1
//
// Logits are float32, unscaled; NaN is the smallest. Where a stage has room for all its chunks it
// keeps them unscored. Entries hold tokens; `score` is that of the last stage. Differs from the
// paper: KV group scope by default, digests instead of keys, no budget of its own in the first
// layers. Errors: FAILED_PRECONDITION when probe "digest" finds no bounds or no key codes. Cost:
// stage 1 is linear in the context: 2 d numbers a page, or 14 (centre) or 9 (first) keys a chunk of
// 256 and head; the later stages are bounded by K1 and K2. Thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

#include "kernels/base/host_device.h"
#include "kernels/sparse/common/chunk_grid.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class InfiniteHipSelector : public Selector {
 public:
  static constexpr int kStages = 3;
  struct Stage {
    int64_t chunk_tokens = 0;
    int64_t keep_tokens = 0;  // 0: the budget
    int64_t query_stride = 0;

    KVASIR_HOST_DEVICE int64_t KeptChunks(int64_t budget) const {
      return kernels::KeptChunks(chunk_tokens, keep_tokens, budget);
    }
  };
  struct Preset {
    absl::string_view name;
    std::array<Stage, kStages> stages;
    std::array<int64_t, kStages> refresh_intervals;

    // Number of tokens that a list reaches into the window: the least number of steps that it may
    // serve.
    int64_t overlap() const { return std::max(stages[0].chunk_tokens, kPageTokens); }
    // The chunks that stage 1 begins with.
    ChunkGrid grid() const {
      return {.chunk_tokens = stages[0].chunk_tokens,
              .overlap = overlap(),
              .keep_tokens = stages[0].keep_tokens};
    }
  };
  enum class Probe { kDigest, kCentre, kFirst };

  // Whether un-rotated keys are placed chunk-indexed in the layer.
  static constexpr bool IsChunkIndexed(int64_t layer) { return layer < 3; }
  // INVALID_ARGUMENT for an unknown name.
  static absl::StatusOr<const Preset*> FindPreset(absl::string_view name);
  struct Options {
    const Preset* preset = nullptr;
    Probe probe = Probe::kDigest;
    Scope scope = Scope::kKvGroup;
  };
  // INVALID_ARGUMENT for an unknown option, preset, probe or scope.
  static absl::StatusOr<Options> Parse(const MethodOptions& options);
  static absl::StatusOr<std::unique_ptr<Selector>> Create(const MethodOptions& options);

  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return true; }
  Scope scope() const override { return scope_; }
  bool NeedsKeyCodes() const override { return probe_ == Probe::kDigest; }
  std::span<const int64_t> RefreshIntervals() const override { return preset_.refresh_intervals; }
  int64_t MaxStageItems(const PolicyNumbers& numbers, int64_t tokens) const override;
  int64_t MinWindowTokens() const override;
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
  GpuSupport SupportsGpu() const override;

 private:
  InfiniteHipSelector(const Preset& preset, Probe probe, Scope scope)
      : preset_(preset), probe_(probe), scope_(scope) {}
  absl::Status Check(const SelectParams& params, const PageSelection& out) const;

  const Preset& preset_;
  const Probe probe_;
  const Scope scope_;
};

}  // namespace kvasir::kernels
