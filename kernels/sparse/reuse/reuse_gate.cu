// A CTA takes the rows that choose together, one by one. Each thread has some pairs of elements of
// the query and of the queries that the stages ran with, un-rotated in registers. The products are
// summed over the CTA. Where ranks choose together, a kernel of its own writes the products of each
// head, the ranks exchange them, and then each rank judges by those of all heads, added in the same
// order.
#include "kernels/base/cuda_status.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/reuse/reuse_gate_cuda.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kStages = static_cast<int>(kMaxStages);

// The parts of the cosines.
struct Products {
  double qq = 0;            // of the query with itself
  double qa[kStages] = {};  // with those that the stages ran with
  double aa[kStages] = {};  // of these with themselves

  __device__ void Add(const Products& other) {
    qq += other.qq;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      qa[s] += other.qa[s];
      aa[s] += other.aa[s];
    }
  }
};

struct ReuseGateLaunch {
  SelectLaunch select = {};
  QueryRotation rotation = {};
  int64_t heads = 1;  // KV heads that choose together, of this rank
  // [query tiles, heads_of_layer]: the products of each head of the layer. Null: they are not
  // exchanged.
  Products* products = nullptr;
  LayerPart part = {};
};

// The pairs of elements, half a head apart, of a row's query that belong to a thread. Their
// rotation is undone up to a factor.
class RowQuery {
 public:
  __device__ RowQuery(const ReuseGateLaunch& p, const DeviceRow& row)
      : p_(p), row_(row), half_(static_cast<int>(p.select.kv.layout.head_dim) / 2) {}

  // Calls use(i, x, j, y) for pairs of elements i and j of the group's heads, which are
  // concatenated.
  template <typename Use>
  __device__ void ForEachPair(const Use& use) const {
    const int pairs = static_cast<int>(p_.select.group) * half_;
    const int64_t angles = row_.tile.first_row * half_;
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += kThreads) {
      const int head = pair / half_;
      const int element = pair % half_;
      const float x = QueryElement(p_.select, row_, 0, head, element);
      const float y = QueryElement(p_.select, row_, 0, head, element + half_);
      const int i = head * 2 * half_ + element;
      if (p_.rotation.cos == nullptr) {
        use(i, x, i + half_, y);
        continue;
      }
      const float cos = p_.rotation.cos[angles + element];
      const float sin = p_.rotation.sin[angles + element];
      use(i, x * cos + y * sin, i + half_, y * cos - x * sin);
    }
  }

 private:
  const ReuseGateLaunch& p_;
  const DeviceRow& row_;
  const int half_;
};

// Returns the sum over the threads of the CTA, added in one order. By all threads.
__device__ double SumOverBlock(double value) {
  __shared__ double sums[kWarps];
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (threadIdx.x % kWarpThreads == 0) sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  double sum = 0;
  for (const double of_warp : sums) sum += of_warp;
  return sum;
}

__device__ void AddProducts(const RowQuery& query, const RowReuse& reuse, Products& sum) {
  Products own;
  query.ForEachPair([&](int i, double x, int j, double y) {
    own.qq += x * x + y * y;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (s >= reuse.num_stages()) break;
      const double a = reuse.anchor(s)[i];
      const double b = reuse.anchor(s)[j];
      own.qa[s] += x * a + y * b;
      own.aa[s] += a * a + b * b;
    }
  });
  sum.qq += SumOverBlock(own.qq);
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s >= reuse.num_stages()) break;
    sum.qa[s] += SumOverBlock(own.qa[s]);
    sum.aa[s] += SumOverBlock(own.aa[s]);
  }
}

// Remembers the query as the one that stages from `first` on run with.
__device__ void Remember(const RowQuery& query, const RowReuse& reuse, int first) {
  if (threadIdx.x == 0) reuse.remembered().first_stage = first;
  query.ForEachPair([&](int i, float x, int j, float y) {
    for (int s = first; s < reuse.num_stages(); ++s) {
      reuse.anchor(s)[i] = x;
      reuse.anchor(s)[j] = y;
    }
  });
}

// Whether the rows of a query tile are judged by queries.
__device__ bool IsJudged(const RowReuse& reuse, const DeviceRow& row) {
  return reuse.remembers() && MakeHeader(row.tile, row.numbers).kind != SelectionHeader::Kind::kAll;
}

// Writes the products of all heads of the layer: zeros for those of other ranks, so that the sum
// over ranks of their bits is what each rank wrote.
__global__ void __launch_bounds__(kThreads)
    ProductsKernel(const __grid_constant__ ReuseGateLaunch p) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  for (int64_t head = 0; head < p.part.num_heads; ++head) {
    Products products;
    const int64_t own = head - p.part.first_head;
    if (own >= 0 && own < p.heads) {
      const DeviceRow row(p.select, static_cast<uint32_t>(blockIdx.x * p.heads + own));
      const RowReuse reuse(p.select, row);
      if (IsJudged(reuse, row)) AddProducts(RowQuery(p, row), reuse, products);
    }
    if (threadIdx.x == 0) p.products[blockIdx.x * p.part.num_heads + head] = products;
  }
}

__global__ void __launch_bounds__(kThreads)
    ReuseGateKernel(const __grid_constant__ ReuseGateLaunch p) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const auto heads = static_cast<uint32_t>(p.heads);
  const DeviceRow first_row(p.select, blockIdx.x * heads);
  const RowReuse first_reuse(p.select, first_row);
  if (!IsJudged(first_reuse, first_row)) return;
  Products products;  // in the order of the heads
  if (p.products != nullptr) {
    const Products* const of_heads = p.products + blockIdx.x * p.part.num_heads;
    for (int64_t head = 0; head < p.part.num_heads; ++head) products.Add(of_heads[head]);
  } else {
    for (uint32_t head = 0; head < heads; ++head) {
      const DeviceRow row(p.select, blockIdx.x * heads + head);
      AddProducts(RowQuery(p, row), RowReuse(p.select, row), products);
    }
  }
  const int first = first_reuse.Judge([&](int stage) {  // NaN: one query is 0
    return static_cast<float>(products.qa[stage] / sqrt(products.qq * products.aa[stage]));
  });
  __syncthreads();  // all have judged
  for (uint32_t head = 0; head < heads; ++head) {
    const DeviceRow row(p.select, blockIdx.x * heads + head);
    Remember(RowQuery(p, row), RowReuse(p.select, row), first);
  }
}

cudaError_t Launch(void (*kernel)(ReuseGateLaunch), const ReuseGateLaunch& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.select.out.num_rows / p.heads);
  return LaunchOverlapped(kernel, blocks, kThreads, 0, stream, p);
}

// Fills the products of all heads of the layer, those of other ranks included.
absl::Status ExchangeProducts(const ReuseGateLaunch& p, cudaStream_t stream) {
  static_assert(sizeof(Products) % sizeof(int64_t) == 0);
  KVASIR_RETURN_IF_ERROR(
      CudaStatus(Launch(ProductsKernel, p, stream), "launching the products of the reuse gate"));
  const int64_t words = p.part.num_heads * static_cast<int64_t>(sizeof(Products) / sizeof(int64_t));
  return p.part.ranks->Sum({.values = reinterpret_cast<int64_t*>(p.products),
                            .rows = p.select.out.num_rows / p.heads,
                            .stride = words},
                           stream);
}

}  // namespace

int64_t JudgeReuseWorkspaceBytes(int64_t heads_of_layer, int64_t tiles) {
  return tiles * heads_of_layer * static_cast<int64_t>(sizeof(Products));
}

absl::Status JudgeReuse(const CudaSelectParams& p, Scope scope, const PageSelection& rows,
                        std::byte* workspace, cudaStream_t stream) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("reuse on the GPU");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.numbers.size() == p.tiles.size(), "numbers must be one per query tile")
      .Require(p.device_memories.size() == p.tiles.size(), "memories must be one per query tile")
      .Require(rows.num_rows == static_cast<int64_t>(p.tiles.size()) * layout.num_kv_heads,
               "the selection's num_rows must be blocks x KV heads");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.tiles.empty()) return absl::OkStatus();
  const bool by_layer = scope == Scope::kLayer;
  const bool exchanges = by_layer && p.part.ranks != nullptr;
  const ReuseGateLaunch launch = {
      .select = {.q = p.q.data(),
                 .q_dtype = p.q.dtype(),
                 .group = p.q.dim(1) / layout.num_kv_heads,
                 .kv = p.kv,
                 .layer = p.layer,
                 .tiles = p.tiles.data(),
                 .numbers = p.numbers.data(),
                 .memories = p.device_memories.data(),
                 .out = rows},
      .rotation = p.rotation,
      .heads = by_layer ? layout.num_kv_heads : 1,
      .products = exchanges ? reinterpret_cast<Products*>(workspace) : nullptr,
      .part = p.part};
  if (exchanges) KVASIR_RETURN_IF_ERROR(ExchangeProducts(launch, stream));
  return CudaStatus(Launch(ReuseGateKernel, launch, stream), "launching the reuse gate");
}

}  // namespace kvasir::kernels
