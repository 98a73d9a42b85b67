// Internal to tokenselect_logits.cu: streams a row's keys through a ring in shared memory, page by
// page, as bfloat16. Keys of quantized KV are decoded there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/hopper.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/paged/kv_codes.cuh"
#include "kernels/sparse/tokenselect/voting_row.cuh"

namespace kvasir::kernels {
namespace {

// Codes are copied to the end of a stage.
template <int kHeadDim>
struct KeyRing {
  static constexpr int kStages = 3 * 128 / kHeadDim;
  static constexpr int kPageBytes = static_cast<int>(kPageTokens) * kHeadDim * 2;
  static constexpr int kCodeBytes = kPageBytes / 2;
  alignas(128) std::byte pages[kStages][kPageBytes];
  alignas(16) std::byte scales[kStages][kPageTokens];  // of codes
  uint64_t full[kStages];
};

// Streams the pages first, first + step, ... of a row through a warp's ring. By the whole warp.
template <int kHeadDim, bool kCoded>
class KeyStream {
  using Ring = KeyRing<kHeadDim>;
  static constexpr int kStages = Ring::kStages;

 public:
  __device__ KeyStream(const TokenSelectLaunch& p, const VotingRow& row, Ring& ring, int64_t first,
                       int64_t step)
      : p_(p),
        row_(row),
        ring_(ring),
        first_(first),
        step_(step),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads) {
    if (lane_ == 0) {
      for (uint64_t& full : ring.full) hopper::BarrierInit(&full, 1);
      hopper::FenceBarrierInit();
    }
    __syncwarp();
    for (int i = 0; i < kStages; ++i) Send();
  }

  // Waits for the next page and returns its keys; null if it is absent.
  __device__ const std::byte* Wait() const {
    const int stage = read_ % kStages;
    hopper::BarrierWait(&ring_.full[stage], static_cast<uint32_t>(read_ / kStages % 2));
    if ((exist_ >> stage & 1) == 0) return nullptr;
    if constexpr (kCoded) Decode(stage);
    return ring_.pages[stage];
  }
  // Called after the page was read.
  __device__ void Next() {
    ++read_;
    __syncwarp();
    Send();
  }

 private:
  // Copies the next page into the free stage.
  __device__ void Send() {
    if (sent_ % kWarpThreads == 0) {
      const int64_t page = first_ + (sent_ + lane_) * step_;
      keys_ = page < row_.end_page() ? FindKeys(p_.select, row_.at, page, p_.faults) : nullptr;
    }
    const auto keys = reinterpret_cast<const std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<uintptr_t>(keys_), sent_ % kWarpThreads));
    const int stage = sent_++ % kStages;
    exist_ = (exist_ & ~(1u << stage)) | (keys != nullptr ? 1u << stage : 0);
    if (lane_ != 0) return;
    if (keys == nullptr) {
      hopper::BarrierArrive(&ring_.full[stage]);
    } else if constexpr (kCoded) {
      hopper::BarrierArriveExpecting(&ring_.full[stage],
                                     Ring::kCodeBytes + static_cast<uint32_t>(kPageTokens));
      hopper::CopyOnce(ring_.pages[stage] + Ring::kCodeBytes, keys, Ring::kCodeBytes,
                       &ring_.full[stage]);
      hopper::CopyOnce(ring_.scales[stage], keys + 2 * Ring::kCodeBytes, kPageTokens,
                       &ring_.full[stage]);
    } else {
      hopper::BarrierArriveExpecting(&ring_.full[stage], Ring::kPageBytes);
      hopper::CopyOnce(ring_.pages[stage], keys, Ring::kPageBytes, &ring_.full[stage]);
    }
  }

  // Decodes the stage's keys in place, a few tokens at a time from the first on: what they fill
  // held codes of tokens up to the last of them.
  __device__ void Decode(int stage) const {
    constexpr int kOfToken = kHeadDim / 16;  // lanes, with sixteen codes each
    std::byte* const page = ring_.pages[stage];
    const auto* const codes = reinterpret_cast<const uint4*>(page + Ring::kCodeBytes);
    auto* const keys = reinterpret_cast<uint4*>(page);
    const bool is_int8 = p_.select.kv.layout.dtype == DType::kInt8;
    const auto decode = [&](const uint2& eight) {
      return is_int8 ? DecodeEight<true>(eight) : DecodeEight<false>(eight);
    };
#pragma unroll 1
    for (int i = lane_; i < kPageTokens * kOfToken; i += kWarpThreads) {
      const uint4 own = codes[i];
      const CodeScale scale(static_cast<uint8_t>(ring_.scales[stage][i / kOfToken]));
      __syncwarp();
      keys[2 * i] = scale.Of(decode({own.x, own.y}));
      keys[2 * i + 1] = scale.Of(decode({own.z, own.w}));
      __syncwarp();
    }
    hopper::FenceAsyncProxy();  // the stage is copied to again
  }

  const TokenSelectLaunch& p_;
  const VotingRow& row_;
  Ring& ring_;
  const int64_t first_;
  const int64_t step_;
  const int lane_;
  const std::byte* keys_ = nullptr;  // each lane's: keys of one of the next pages lane
  unsigned exist_ = 0;               // bit i: stage i's page exists
  int sent_ = 0;
  int read_ = 0;
};

}  // namespace
}  // namespace kvasir::kernels
