// The parts a sparse attention method is made of, with PageSelection as the one type between them.
// A decode step of one layer:   reuse gate -> select -> prune -> attend (terminator inside, which
// is attention's: kernels/attention/terminator.h).
// Gate and select together are SelectReusing (kernels/sparse/reuse/). Implementations live in one
// folder a method and are listed in methods.cc. Stages are built once from the server's policies,
// hold no per-sequence state of their own and are thread-compatible.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/executor.h"
#include "kernels/base/scratch.h"
#include "kernels/base/tensor.h"
#include "kernels/dense/rope.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/reuse/device_memory.h"

namespace kvasir::kernels {

struct RowMemory;  // kernels/sparse/reuse/selection_memory.h

// When a list serves later steps too: the numbers of a reuse rule.
struct ReuseNumbers {
  int64_t interval = 0;      // steps between two runs of the first stage; 0: the selector's own
  float theta = 0.9f;        // least cosine of queries that are alike; 1: none are
  float theta_force = 0.5f;  // with less they are far apart
  int64_t max_age = kPageTokens;  // steps that a list serves at most, under the rule that reads it
};

// What is done where a selection keeps less of the attention mass than it is to.
enum class OnViolation : uint8_t { kReport, kDense, kWiden };

// The least mass that is to be kept (quality_contract.h).
struct QualityNumbers {
  float min_mass = 0;  // of every query head of a row; 0: no contract
  OnViolation on_violation = OnViolation::kReport;
  int64_t max_budget_tokens = 0;  // of kWiden; 0: the whole context
};

// The numbers of a policy for one query block: they differ from row to row of a batch. Tokens.
struct SelectionNumbers {
  int64_t sink_tokens = 0;
  int64_t window_tokens = 0;  // includes the query's own token; >= 1
  int64_t budget_tokens = 0;  // selected tokens besides sink and window
  float top_p = 1;            // share of the attention mass of all these that pruning keeps
  int64_t patience = 0;       // of a terminator: pages
  // Candidates end so far behind the window's begin: what will leave the window while the list
  // serves. In [0, 64), less than the window; 0 for a list that serves once.
  int64_t reach_tokens = 0;
  ReuseNumbers reuse = {};
  QualityNumbers quality = {};
};

// The angles that q was rotated by (kernels/dense/rope.h), to undo it. Null: q is not rotated.
struct QueryRotation {
  const float* cos = nullptr;  // [tokens, head_dim / 2]
  const float* sin = nullptr;
};

// Whose query heads choose together.
enum class Scope {
  kKvGroup,  // those of a KV head: what is chosen does not depend on how heads lie on ranks
  kLayer,    // all: ranks that hold a part of them choose together (LayerRanks)
};

// The ranks that hold the KV heads of a layer, for selections of layer scope. All of them make the
// same calls in the same order, on the thread that called Select. Results are the same on all, and
// however many there are: integers are summed, and doubles are never. Errors are the network's.
class LayerRanks {
 public:
  virtual ~LayerRanks() = default;
  // In place, over the ranks; of ranks that share KV heads one counts.
  virtual absl::Status Sum(std::span<int64_t> values) = 0;
  virtual absl::Status Max(std::span<float> values) = 0;
  // The values of all KV heads of the layer, in their order; `own` has as many for each KV head of
  // this rank. Valid until the next call.
  virtual absl::StatusOr<std::span<const double>> Gather(std::span<const double> own) = 0;
};

struct SelectParams {
  TensorView q;  // [tokens, num_heads, head_dim], float32 or bfloat16: all query heads of the KV
                 // heads in `kv`, also those that other ranks attend with
  PagedKv kv;
  int64_t layer = 0;
  float scale = 0;  // of logits, for softmaxes: 1 / sqrt(head_dim) for the models served
  std::span<const QueryBlock> blocks;
  std::span<const SelectionNumbers> numbers;  // one per block
  std::span<uint8_t> faults;   // [num_slots]; set to 1 where a key to be read is absent
  Scratch* scratch = nullptr;  // working memory, required
  // Null: q and the cached keys are rotated. Else neither is, nor are digests, and a stage places
  // them as it says itself (RotateToDistance in key_logits.h). It learns the positions it needs.
  RopePositions* rope = nullptr;
  DeviceRopePositions device_rope = {};  // the same on the GPU: it knows what the stage needs
  QueryRotation rotation = {};  // for reuse rules, which compare queries; none where `rope` is set
  // [blocks x KV heads] or empty: what a row remembers of earlier steps, which says what of it is
  // to be made anew. Null: everything.
  std::span<RowMemory* const> memories = {};
  // The same on the GPU, one per block or empty: there the selector recalls and remembers by itself
  // (reuse/device_memory.h).
  std::span<const DeviceSelectionMemory> device_memories = {};
  // [blocks x KV heads] or empty: a row that is 0 stays as it is. Empty: none does.
  std::span<const uint8_t> wanted = {};
  LayerRanks* ranks = nullptr;  // null: `kv` has all KV heads of the layer
  // On the GPU, where the host does not see the blocks: the most rows that one may have, so that
  // which kernels serve a block does not depend on what else is in q. 0: as many as q leaves.
  int64_t most_rows = 0;

  bool may_have_several_rows() const {
    return most_rows == 0 ? q.dim(0) > std::ssize(blocks) : most_rows > 1;
  }
};

// Why a page that dense attention would read is not attended to: the label of the skip counters.
enum class SkipReason : uint8_t {
  kSelectedOut = 0,  // it was a candidate, others were chosen
  kWindow = 1,       // it lies between sink and window, and the method reads nothing there
};

// The interval of a stage that has none of its own.
inline constexpr int64_t kRefreshIntervals[] = {8};

// Chooses, for every (query block, KV head), what is attended to. Fills headers and lists of `out`,
// whose rows are blocks x num_kv_heads.
//
// For a block whose queries are at positions [first, last]:
//
//   0 ......... sink_end ............ window_begin ...... first ... last
//   [  sink    )[   candidates       )[        window                  ]
//               [          ...  reach)
//
//   window_begin = max(0, first - window_tokens + 1)     sink_end = min(sink_tokens, window_begin)
//
// so the window of the block holds every query's own window, and nothing falls between. Candidates
// end before the first query, so that no query is served a choice made on keys it may not see.
// Short contexts (rule R2): where sink + window + budget >= last + 1, the row's kind is kAll.
class Selector {
 public:
  virtual ~Selector() = default;
  // INVALID_ARGUMENT on shapes, on numbers below their ranges, or when a row of `out` has no room
  // for MaxEntries. Counts no page accesses: what a selector probes is spread over the whole
  // context, and is no reason to promote a page. Rows of a slot with a fault are unspecified.
  virtual absl::Status Select(const SelectParams& params, PageSelection& out,
                              Executor& executor) const = 0;
  // Entries a row needs at most for these numbers over a context of `tokens`.
  virtual int64_t MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const = 0;
  // False where the choice depends on positions alone: then the heads of a group that lie on other
  // ranks need not be fetched for it.
  virtual bool ReadsQueries() const = 0;
  // Under kLayer all rows of a block get the same list.
  virtual Scope scope() const { return Scope::kKvGroup; }
  // Whether the KV must keep key codes for it (kernels/paged/key_codes.h).
  virtual bool NeedsKeyCodes() const { return false; }
  // Of each stage, 1 to kMaxStages: steps between two of its runs where lists are reused.
  virtual std::span<const int64_t> RefreshIntervals() const { return kRefreshIntervals; }
  // What a stage before the last leaves to the next at most, over a context of `tokens`.
  virtual int64_t MaxStageItems(const SelectionNumbers&, int64_t /*tokens*/) const { return 0; }
  // The least window it can work with; Select answers INVALID_ARGUMENT below.
  virtual int64_t MinWindowTokens() const { return 1; }
  virtual SkipReason skip_reason() const = 0;
};

// Narrows a selection: clears `live` bits, never sets one, never touches sink and window.
class Pruner {
 public:
  virtual ~Pruner() = default;
  // `params` as of the Select call that filled `selection`.
  virtual absl::Status Prune(const SelectParams& params, PageSelection& selection,
                             Executor& executor) const = 0;
  virtual bool NeedsKeyCodes() const = 0;
};

// How long ago a stage of a row ran.
struct StageAge {
  int64_t steps = 0;     // at least 1
  int64_t interval = 0;  // of the stage, in steps
  float cosine = 0;      // of the query and the one it ran with; NaN: unknown
};

// Decides, per row, which of a selector's stages run again and which serve with what they left.
class ReuseRule {
 public:
  // What happens to tokens that leave the window while a list serves: they were candidates, for the
  // list reaches into the window; or they stay, for the window does not move.
  enum class Window { kSlides, kGrows };

  virtual ~ReuseRule() = default;
  // Whether the stage runs again. Then the stages behind it do too.
  virtual bool Refreshes(const StageAge& age, const ReuseNumbers& numbers) const = 0;
  // Steps that a stage of this interval serves at most, that in which it runs included.
  virtual int64_t ServedSteps(int64_t interval, const ReuseNumbers& numbers) const = 0;
  // Whether it looks at StageAge::cosine.
  virtual bool ReadsQueries() const = 0;
  virtual Window window() const = 0;
};

}  // namespace kvasir::kernels
