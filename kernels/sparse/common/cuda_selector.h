// The stages of a method as a GPU runs them: the other half of Selector, Pruner and Terminator
// (stages.h, kernels/attention/terminator.h), with the same choices where scores differ by more
// than rounding. Made once for each served shape of policy from the table in methods_cuda.cc, and
// walked by worker/backend/cuda/cuda_select.cc and cuda_attention.cc, which know no method by name.
// They hold no per-sequence state. Thread-safe. Implemented in builds with CUDA only; the
// interfaces are in every build.
//
// In all calls, pointers of the params, spans included, are device memory. Calls allocate nothing
// and wait for nothing, and may be captured in a graph. A row depends on nothing but itself; at
// layer scope, on its query tile, and on all ranks that hold a part of the layer. Where a row
// reuses its list, that is the duty of the selector's own kernels (reuse/reuse_row.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/ranks/rank_rows.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/common/stages.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace kvasir::kernels {

struct CudaAttendParams;  // kernels/attention/attend_cuda.h
struct KvTensorMaps;      // kernels/paged/kv_tensor_maps.h

// The ranks that hold the KV heads of a layer, as LayerRanks (stages.h), on a GPU's stream: rows of
// all ranks become one. All ranks make the same calls in the same order. Ranks that share KV heads
// count once in sums. Errors are those of launches and of the network.
class CudaLayerRanks {
 public:
  virtual ~CudaLayerRanks() = default;
  virtual absl::Status Sum(const RankRows<int64_t>& rows, CUstream_st* stream) = 0;
  virtual absl::Status Max(const RankRows<uint32_t>& rows, CUstream_st* stream) = 0;
};

// The KV heads of a call among those of their layer, for selections of layer scope.
struct LayerPart {
  CudaLayerRanks* ranks = nullptr;  // null: the call has all KV heads of the layer
  int64_t first_head = 0;           // the number of the call's first KV head in the layer
  int64_t num_heads = 0;            // KV heads of the layer
};

// A Select or Prune call on the GPU.
struct CudaSelectParams : SelectCall {
  // Off when q and the cached keys are rotated. Otherwise q, keys and digests are not, and each
  // stage places them as it documents. Has all positions that the stages need.
  DeviceRopePositions device_rope = {};
  // One per query tile or empty. The selector itself recalls and remembers (reuse/reuse_row.cuh).
  std::span<const DeviceSelectionMemory> device_memories = {};
  // The most queries that a tile may have: the host does not see the tiles, and the kernels that
  // serve one must not depend on what else is in q. 0: as many as q leaves.
  int64_t most_rows = 0;
  LayerPart part = {};

  // Number of KV heads of the layer, those of other ranks included.
  int64_t heads_of_layer() const {
    return part.ranks == nullptr ? kv.layout.num_kv_heads : part.num_heads;
  }
  bool may_have_several_rows() const {
    return most_rows == 0 ? q.dim(0) > std::ssize(tiles) : most_rows > 1;
  }
};

// Upper limits over all rows and layers of a step. The launches of a step depend on them, so that a
// graph serves every step with the same limits.
struct SelectBounds {
  int64_t group = 0;          // query heads of a KV head
  int64_t capacity = 0;       // entries
  int64_t budget_tokens = 0;  // of selectors that list
  int64_t listed_tokens = 0;  // sink, window and list together, of selectors that list
};

// Distance of query r of a query tile: window_tokens - within_window, plus r where it counts from
// the query's own window. The default is SelectionDistance (select_common.h).
struct QueryDistance {
  int64_t within_window = 0;
  bool of_own_window = true;
};

class CudaSelector {
 public:
  virtual ~CudaSelector() = default;
  // True for a selector that attends to everything, whatever the numbers are. Its headers are
  // written with the step's table: none of the calls below is made.
  virtual bool ReadsAll() const { return false; }
  // Bytes of device memory that Select needs for a call of `tiles` query tiles.
  virtual int64_t WorkspaceBytes(const SelectBounds&, const PagedKv&, int64_t /*tiles*/) const {
    return 0;
  }
  // Number of positions beyond the window at which the selector places un-rotated keys or queries
  // itself.
  virtual int64_t ExtraPositions(const SelectBounds&, const PagedKv&) const { return 0; }
  // Where keys are cached un-rotated: the distance to which the queries of a layer are rotated
  // before Select (distant_queries_cuda.h). Then params.device_rope is off. None: Select takes the
  // queries un-rotated, or reads none.
  virtual std::optional<QueryDistance> RotatesQueries(int64_t /*layer*/) const {
    return QueryDistance{};
  }
  // Fills headers and lists of `out`, whose rows are query tiles x num_kv_heads. REQUIRES: numbers
  // are within the bounds. INVALID_ARGUMENT on shapes. FAILED_PRECONDITION when the KV lacks bounds
  // or key codes. INTERNAL with CUDA's error when a launch fails.
  virtual absl::Status Select(const CudaSelectParams& params, const SelectBounds& bounds,
                              const PageSelection& out, std::byte* workspace,
                              CUstream_st* stream) const = 0;
};

class CudaPruner {
 public:
  virtual ~CudaPruner() = default;
  virtual int64_t WorkspaceBytes(const SelectBounds& bounds, const PagedKv& kv,
                                 int64_t tiles) const = 0;
  // `params` are those of the Select call that filled `selection`, with queries as the model made
  // them. Errors: those of CudaSelector::Select.
  virtual absl::Status Prune(const CudaSelectParams& params, const SelectBounds& bounds,
                             const PageSelection& selection, std::byte* workspace,
                             CUstream_st* stream) const = 0;
};

class CudaTerminator {
 public:
  virtual ~CudaTerminator() = default;
  // Bytes of device memory that Attend needs for `tiles` query tiles of `group` query heads.
  virtual int64_t WorkspaceBytes(const PagedKv& kv, int64_t tiles, int64_t group) const = 0;
  // Attends with query tiles of one query each, whose params have device_counts. `numbers` are one
  // per query tile. Errors: those of AttendDecode (kernels/attention/attend_cuda.h).
  virtual absl::Status Attend(const CudaAttendParams& params,
                              std::span<const PolicyNumbers> numbers, const KvTensorMaps& maps,
                              std::byte* workspace, CUstream_st* stream) const = 0;
};

// The halves of one policy's stages. Null where the policy has no such stage.
struct CudaStages {
  std::unique_ptr<CudaSelector> selector;
  std::unique_ptr<CudaPruner> pruner;
  std::unique_ptr<CudaTerminator> terminator;
};

}  // namespace kvasir::kernels
