// The stages that a sparse attention method is made of. PageSelection is the one type between them.
// A decode step of one layer runs:
//   reuse gate -> select -> prune -> attend with a terminator (kernels/attention/terminator.h)
// Reuse of earlier lists differs by device. On the CPU it is a wrapper around any selector:
// SelectReusing (reuse/reusing_select.h). On the GPU it is a duty of every kernel of a selector:
// each asks RowReuse which stages run, and the last one recalls or remembers the list
// (reuse/reuse_row.cuh). Each method has a folder and is listed in methods.cc. Stages are built
// once from the server's policies, hold no per-sequence state and are thread-compatible.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/executor.h"
#include "kernels/base/scratch.h"
#include "kernels/base/tensor.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse/common/device_memory.h"

namespace kvasir::kernels {

struct RowMemory;  // kernels/sparse/common/selection_memory.h

// The numbers of a reuse rule, which decides when a list serves later steps.
struct ReuseNumbers {
  int64_t interval = 0;      // steps between two runs of the first stage; 0: the selector's own
  float theta = 0.9f;        // least cosine of queries that count as alike; 1: none do
  float theta_force = 0.5f;  // below this cosine queries are far apart
  int64_t max_age = kPageTokens;  // most steps that a list serves, under rule `cosine`
};

// The action where a selection keeps less attention mass than the policy asks for.
enum class OnViolation : uint8_t { kReport, kDense, kWiden };

// The least attention mass that a selection must keep (quality_contract.h).
struct QualityNumbers {
  float min_mass = 0;  // for every query head of a row; 0: no contract
  OnViolation on_violation = OnViolation::kReport;
  int64_t max_budget_tokens = 0;  // for kWiden; 0: the whole context
};

// The numbers of a policy for one query tile, in tokens except where said. They differ from tile to
// tile of a batch.
struct PolicyNumbers {
  int64_t sink_tokens = 0;
  int64_t window_tokens = 0;  // includes the query's own token; >= 1
  int64_t budget_tokens = 0;  // selected tokens besides sink and window
  float top_p = 1;            // share of the mass of all selected tokens that pruning keeps
  int64_t patience = 0;       // of a terminator, in pages
  // Number of candidates past the window's begin: the tokens that will leave the window while the
  // list serves. In [0, 64) and less than the window; 0 for a list that serves one step.
  int64_t reach_tokens = 0;
  ReuseNumbers reuse = {};
  QualityNumbers quality = {};
};

// The angles that q was rotated by (kernels/rope/rope.h), to undo the rotation. Null: q is not
// rotated.
struct QueryRotation {
  const float* cos = nullptr;  // [tokens, head_dim / 2]
  const float* sin = nullptr;
};

// The query heads that choose together.
enum class Scope {
  kKvGroup,  // those of a KV head: the choice does not depend on how ranks share the heads
  kLayer,    // all of the layer: ranks that hold a part choose together (LayerRanks)
};

// The ranks that hold the KV heads of a layer, for selections of layer scope. All ranks make the
// same calls in the same order, each on the thread that called Select. Results are the same on all
// ranks and for any number of ranks: integers are summed, doubles never are. Errors are the
// network's.
class LayerRanks {
 public:
  virtual ~LayerRanks() = default;
  // Replaces `values` by their sum or largest over the ranks. Ranks that share KV heads count once.
  virtual absl::Status Sum(std::span<int64_t> values) = 0;
  virtual absl::Status Max(std::span<float> values) = 0;
  // Returns the values of all KV heads of the layer in order. `own` holds the same number of values
  // for each KV head of this rank. Valid until the next call.
  virtual absl::StatusOr<std::span<const double>> Gather(std::span<const double> own) = 0;
};

// The part of a Select or Prune call that is the same on every device.
struct SelectCall {
  TensorView q;  // [tokens, num_heads, head_dim], float32 or bfloat16: all query heads of the KV
                 // heads in `kv`, those that other ranks attend with included
  PagedKv kv;
  int64_t layer = 0;
  float scale = 0;  // of logits in softmaxes: 1 / sqrt(head_dim) for the models served
  std::span<const QueryTile> tiles;
  std::span<const PolicyNumbers> numbers;  // one per query tile
  std::span<uint8_t> faults;               // [num_slots]; set to 1 where a key to be read is absent
  // For reuse rules, which compare queries. None where keys are cached un-rotated.
  QueryRotation rotation = {};
};

// A Select or Prune call on the CPU. CudaSelectParams (cuda_selector.h) is the GPU's.
struct SelectParams : SelectCall {
  Scratch* scratch = nullptr;  // working memory, required
  // Null: q and the cached keys are rotated. Otherwise q, keys and digests are not, and each stage
  // places them as it documents (RotateToDistance in key_logits.h). The positions that a stage
  // needs are added to it.
  RopePositions* rope = nullptr;
  // [query tiles x KV heads] or empty: the memory of each row's earlier steps, which also says
  // which stages run again. Null: the row remembers nothing and all stages run.
  std::span<RowMemory* const> memories = {};
  // [query tiles x KV heads] or empty (all rows are wanted). A row whose value is 0 stays
  // unchanged.
  std::span<const uint8_t> wanted = {};
  LayerRanks* ranks = nullptr;  // null: `kv` has all KV heads of the layer
};

// Why a page that dense attention would read is not attended to: the label of the skip counters.
enum class SkipReason : uint8_t {
  kSelectedOut = 0,  // a candidate, but others were chosen
  kWindow = 1,       // between sink and window, where the method reads nothing
};

// The refresh interval, in steps, of a selector that declares none.
inline constexpr int64_t kRefreshIntervals[] = {8};

// Most query heads of a KV head, for kernels on the GPU that hold something of each in registers.
inline constexpr int64_t kMaxCudaGroup = 8;

// How far a selector's kernels for GPUs (methods_cuda.cc) go. The refusals of --device=cuda and the
// table in docs/sparse_methods.md are made from it.
struct GpuSupport {
  bool runs = false;        // it has kernels
  bool reuses = false;      // they recall and remember lists
  bool reads_keys = false;  // where they lie, and not only their digests
  bool any_group = true;    // they serve more than kMaxCudaGroup query heads of a KV head
  // UNIMPLEMENTED, naming the option and the value to use, where they do not serve an option.
  absl::Status options = absl::OkStatus();
};

// Chooses which tokens each row attends to. A row of a selection is a (query tile, KV head). Fills
// the headers and lists of `out`, whose rows are query tiles x num_kv_heads.
//
// For a tile whose queries are at positions [first, last]:
//
//   0 ......... sink_end ............ window_begin ...... first ... last
//   [  sink    )[   candidates       )[        window                  ]
//               [          ...  reach)
//
//   window_begin = max(0, first - window_tokens + 1)     sink_end = min(sink_tokens, window_begin)
//
// The tile's window holds the window of every query in it, and no token falls between. Candidates
// end before the first query, so no query is served a choice made with keys that it may not see.
// Short contexts (rule R2): where sink + window + budget >= last + 1, the row's kind is kAll.
class Selector {
 public:
  virtual ~Selector() = default;
  // INVALID_ARGUMENT on shapes, on numbers below their ranges, or when a row of `out` has no room
  // for MaxEntries. Counts no page accesses: a selector's probes are spread over the whole context
  // and are no reason to promote a page. Rows of a slot with a fault are unspecified.
  virtual absl::Status Select(const SelectParams& params, PageSelection& out,
                              Executor& executor) const = 0;
  // Returns the most entries that a row needs for these numbers over a context of `tokens`.
  virtual int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const = 0;
  // False if the choice depends on positions alone. Then query heads of a group that lie on other
  // ranks need not be fetched for it.
  virtual bool ReadsQueries() const = 0;
  // Under kLayer all rows of a query tile get the same list.
  virtual Scope scope() const { return Scope::kKvGroup; }
  // Whether the KV must keep key codes (kernels/append/key_codes.h).
  virtual bool NeedsKeyCodes() const { return false; }
  // Steps between two runs of each stage where lists are reused. 1 to kMaxStages of them.
  virtual std::span<const int64_t> RefreshIntervals() const { return kRefreshIntervals; }
  // Most items that a stage before the last leaves to the next, over a context of `tokens`.
  virtual int64_t MaxStageItems(const PolicyNumbers&, int64_t /*tokens*/) const { return 0; }
  // The least window that the selector works with. Select returns INVALID_ARGUMENT below it.
  virtual int64_t MinWindowTokens() const { return 1; }
  virtual SkipReason skip_reason() const = 0;
  // Known in every build, so that refusals are the same and are tested without a GPU.
  virtual GpuSupport SupportsGpu() const { return {}; }
};

// Narrows a selection: clears bits of `live`, sets none, and leaves sink and window untouched.
class Pruner {
 public:
  virtual ~Pruner() = default;
  // `params` are those of the Select call that filled `selection`.
  virtual absl::Status Prune(const SelectParams& params, PageSelection& selection,
                             Executor& executor) const = 0;
  virtual bool NeedsKeyCodes() const = 0;
};

// How long ago a stage of a row ran.
struct StageAge {
  int64_t steps = 0;     // since it ran; at least 1
  int64_t interval = 0;  // the stage's own, in steps
  float cosine = 0;      // of this query and the one it ran with; NaN: unknown
};

// Decides for each row which stages of a selector run again. The others serve with their last
// output.
class ReuseRule {
 public:
  // The fate of tokens that leave the window while a list serves. kSlides: they were candidates,
  // because the list reaches into the window. kGrows: they stay, because the window's begin does
  // not move.
  enum class Window { kSlides, kGrows };

  virtual ~ReuseRule() = default;
  // Whether the stage runs again. If so, all later stages run too.
  virtual bool Refreshes(const StageAge& age, const ReuseNumbers& numbers) const = 0;
  // Most steps that a stage of this interval serves, including the step in which it runs.
  virtual int64_t ServedSteps(int64_t interval, const ReuseNumbers& numbers) const = 0;
  // Whether the rule reads StageAge::cosine.
  virtual bool ReadsQueries() const = 0;
  virtual Window window() const = 0;
  // The same rule as kernels on a GPU name it.
  virtual DeviceReuseRule on_device() const = 0;
};

}  // namespace kvasir::kernels
