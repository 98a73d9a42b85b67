// The sum of large messages among peers: each rank adds up its slice of the elements and sends the
// sum to all.
#include <algorithm>

#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/ranks/patience.cuh"
#include "kernels/ranks/rank_ops_cuda.h"
#include <cuda/atomic>

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kLeastUnitsOfCta = kThreads;
static_assert(kSlicedSumUnit == 8);

struct SlicedSumLaunch {
  PeerSumEnd end;
  const float* x;  // [units][8]
  BFloat16* y;     // [units][8]
  int64_t units;   // 1 to kSlicedSumElements / 8
  int64_t units_of_slice, units_of_cta;
  uint32_t* progress;
};

struct alignas(16) Part {
  float4 halves[2];
};
union Sum {
  uint4 bits;
  BFloat16 elements[kSlicedSumUnit];
  __device__ Sum() : bits() {}
};

// The parts of a rank's slices, at the address where this rank reaches them.
struct Slices {
  __device__ explicit Slices(std::byte* begin)
      : parts(reinterpret_cast<Part*>(begin)),
        sums(reinterpret_cast<uint4*>(begin + kSlicedSumPartBytes)),
        parts_came(
            reinterpret_cast<uint32_t*>(begin + kSlicedSumPartBytes + kSlicedSumElements * 2)),
        sums_came(parts_came + kMaxPeers * kSlicedSumCtas) {}

  Part* parts;           // [num_ranks][units_of_slice]
  uint4* sums;           // [units]
  uint32_t* parts_came;  // [kMaxPeers][kSlicedSumCtas], number of the last call
  uint32_t* sums_came;   // likewise
};

using Flag = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;

__device__ int64_t FlagOf(int rank) { return rank * kSlicedSumCtas + blockIdx.x; }

// A thread for each peer waits for its flag. Returns whether all came, to all threads.
__device__ bool AwaitAll(const PeerSumEnd& end, uint32_t* flags, uint32_t call) {
  bool came = true;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < end.num_ranks && rank != end.rank) {
    Patience patience(end);
    while (Flag(flags[FlagOf(rank)]).load(cuda::memory_order_acquire) != call) {
      if (!patience.IsOver()) continue;
      came = false;
      break;
    }
  }
  return __syncthreads_and(came) != 0;
}

// After the barrier one thread's release covers what all threads of the CTA wrote.
__device__ void RaiseAll(const PeerSumEnd& end, uint32_t* Slices::*flags, uint32_t call) {
  __syncthreads();
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= end.num_ranks || rank == end.rank) return;
  Flag((Slices(end.slices[rank]).*flags)[FlagOf(end.rank)]).store(call, cuda::memory_order_release);
}

__device__ Part LoadPart(const float* x) {
  const auto* const halves = reinterpret_cast<const float4*>(x);
  return {{halves[0], halves[1]}};
}

// Parts that peers wrote are read past L1, which may hold those of the last call.
__device__ Part LoadSent(const Part* part) {
  return {{__ldcg(&part->halves[0]), __ldcg(&part->halves[1])}};
}

__device__ void AddPart(const Part& part, float (&sum)[kSlicedSumUnit]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = part.halves[half];
    sum[4 * half] += four.x;
    sum[4 * half + 1] += four.y;
    sum[4 * half + 2] += four.z;
    sum[4 * half + 3] += four.w;
  }
}

__device__ void AddToResult(const Sum& sum, BFloat16* y) {
  Sum result;
  result.bits = *reinterpret_cast<const uint4*>(y);
#pragma unroll
  for (int i = 0; i < kSlicedSumUnit; ++i) {
    result.elements[i] =
        BFloat16(static_cast<float>(result.elements[i]) + static_cast<float>(sum.elements[i]));
  }
  *reinterpret_cast<uint4*>(y) = result.bits;
}

class SlicedSum {
 public:
  __device__ explicit SlicedSum(const SlicedSumLaunch& p)
      : p_(p), end_(p.end), own_(p.end.slices[p.end.rank]) {}

  // Every rank starts with a different peer, so that no peer is written by all at once.
  __device__ void SendParts() const {
    for (int step = 1; step < end_.num_ranks; ++step) {
      const int owner = (end_.rank + step) % end_.num_ranks;
      Part* const parts = Slices(end_.slices[owner]).parts + end_.rank * p_.units_of_slice;
      ForUnits(owner, [&](int64_t unit, int64_t in_slice) {
        parts[in_slice] = LoadPart(p_.x + unit * kSlicedSumUnit);
      });
    }
  }

  // Adds up the own slice in rank order, and sends the sums.
  __device__ void AddUp() const {
    ForUnits(end_.rank, [&](int64_t unit, int64_t in_slice) {
      float added[kSlicedSumUnit] = {};
      for (int rank = 0; rank < end_.num_ranks; ++rank) {
        AddPart(rank == end_.rank ? LoadPart(p_.x + unit * kSlicedSumUnit)
                                  : LoadSent(own_.parts + rank * p_.units_of_slice + in_slice),
                added);
      }
      Sum sum;
#pragma unroll
      for (int i = 0; i < kSlicedSumUnit; ++i) sum.elements[i] = BFloat16(added[i]);
      for (int step = 1; step < end_.num_ranks; ++step) {
        const int peer = (end_.rank + step) % end_.num_ranks;
        Slices(end_.slices[peer]).sums[unit] = sum.bits;
      }
      AddToResult(sum, p_.y + unit * kSlicedSumUnit);
    });
  }

  __device__ void TakeSums() const {
    for (int step = 1; step < end_.num_ranks; ++step) {
      ForUnits((end_.rank + step) % end_.num_ranks, [&](int64_t unit, int64_t) {
        Sum sum;
        sum.bits = __ldcg(own_.sums + unit);
        AddToResult(sum, p_.y + unit * kSlicedSumUnit);
      });
    }
  }

  __device__ void GiveUp() const {
    constexpr uint32_t kTwoNans = 0x7fc07fc0;
    for (int owner = 0; owner < end_.num_ranks; ++owner) {
      ForUnits(owner, [&](int64_t unit, int64_t) {
        *reinterpret_cast<uint4*>(p_.y + unit * kSlicedSumUnit) = {kTwoNans, kTwoNans, kTwoNans,
                                                                   kTwoNans};
      });
    }
  }

  __device__ bool PartsCame(uint32_t call) const { return AwaitAll(end_, own_.parts_came, call); }
  __device__ bool SumsCame(uint32_t call) const { return AwaitAll(end_, own_.sums_came, call); }

 private:
  // Calls use(unit, number in the slice) for this thread's units of an owner's slice.
  template <typename Use>
  __device__ void ForUnits(int owner, const Use& use) const {
    const int64_t slice = owner * p_.units_of_slice;
    const int64_t begin = blockIdx.x * p_.units_of_cta;
    const int64_t last = min(begin + p_.units_of_cta, min(p_.units_of_slice, p_.units - slice));
    for (int64_t i = begin + threadIdx.x; i < last; i += kThreads) use(slice + i, i);
  }

  const SlicedSumLaunch& p_;
  const PeerSumEnd& end_;
  const Slices own_;
};

// Three CTAs fit on a multiprocessor, so that up to three ranks may share a GPU, as in tests.
__global__ __launch_bounds__(kThreads,
                             3) void SlicedSumKernel(const __grid_constant__ SlicedSumLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const uint32_t call = p.end.sliced_calls[blockIdx.x] + 1;
  const SlicedSum sum(p);
  sum.SendParts();
  RaiseAll(p.end, &Slices::parts_came, call);
  bool came = sum.PartsCame(call);
  if (came) {
    sum.AddUp();
    RaiseAll(p.end, &Slices::sums_came, call);
    came = sum.SumsCame(call);
  }
  if (came) {
    sum.TakeSums();
  } else {
    sum.GiveUp();
  }
  if (threadIdx.x != 0) return;
  p.end.sliced_calls[blockIdx.x] = call;  // all threads have read it: they met since
  if (blockIdx.x == 0) {
    volatile uint32_t* const progress = p.progress;
    *progress = *progress + 1;
  }
}

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

cudaError_t LaunchSlicedSum(SlicedSumLaunch& p, cudaStream_t stream) {
  p.units_of_slice = DivideUp(p.units, p.end.num_ranks);
  const int64_t ctas = std::min(kSlicedSumCtas, DivideUp(p.units_of_slice, kLeastUnitsOfCta));
  p.units_of_cta = DivideUp(p.units_of_slice, ctas);
  return LaunchOverlapped(SlicedSumKernel, static_cast<unsigned>(ctas), kThreads, 0, stream, p);
}

}  // namespace

absl::Status SlicedPeerSum(const PeerSumEnd& end, const TensorView& x, const TensorView& y,
                           uint32_t* progress, cudaStream_t stream) {
  ShapeCheck check("sliced_peer_sum");
  check.Match("x", x, {"rows", "width"}, DType::kFloat32)
      .Match("y", y, {"rows", "width"}, DType::kBFloat16)
      .Require(x.num_elements() % kSlicedSumUnit == 0, "a multiple of 8 elements")
      .Require(end.num_ranks <= kMaxPeers, "at most 8 ranks");
  KVASIR_RETURN_IF_ERROR(check.status());
  for (int64_t done = 0; done < x.num_elements(); done += kSlicedSumElements) {
    SlicedSumLaunch launch = {
        .end = end,
        .x = x.As<float>() + done,
        .y = y.As<BFloat16>() + done,
        .units = std::min(kSlicedSumElements, x.num_elements() - done) / kSlicedSumUnit,
        .units_of_slice = 0,
        .units_of_cta = 0,
        .progress = progress};
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(LaunchSlicedSum(launch, stream), "launching sliced_peer_sum"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
