// Ranks that write into each other's memory, for tests of ops among peers: each has a stream of its
// own, all on one GPU, where their kernels run beside each other, or each on a GPU of its own.
#pragma once

#include <cstdlib>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <utility>
#include <vector>

#include "kernels/base/device_buffer.h"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {

// Otherwise the driver loads a kernel when it is first used, and not while a rank on the same GPU
// waits for another. To be called before CUDA is first used.
inline bool LoadKernelsAtOnce() { return setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0; }

inline int CountGpus() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

inline DeviceBuffer Zeros(int64_t bytes) {
  DeviceBuffer buffer = DeviceBuffer::Allocate(bytes).value();
  EXPECT_EQ(cudaMemset(buffer.data(), 0, static_cast<size_t>(bytes)), cudaSuccess);
  return buffer;
}

struct PeerRank {
  PeerRank() = default;
  PeerRank(const PeerRank&) = delete;
  PeerRank& operator=(const PeerRank&) = delete;
  ~PeerRank() {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  void Use() const { EXPECT_EQ(cudaSetDevice(device), cudaSuccess); }

  int device = 0;
  DeviceBuffer inbox, slices, row_inbox, counters;
  PinnedBuffer gave_up;
  cudaStream_t stream = nullptr;
  PeerSumEnd end;
};

// Makes the ends of ranks, whose type is derived from PeerRank. The devices of the ranks are set.
template <typename Rank>
void ConnectPeers(std::vector<Rank>& ranks, int64_t patience_ns) {
  for (Rank& rank : ranks) {
    rank.Use();
    for (const Rank& peer : ranks) {
      if (peer.device == rank.device) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer.device, 0);
      ASSERT_TRUE(error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled) << error;
      cudaGetLastError();  // otherwise the next launch would report the error
    }
    rank.inbox = Zeros(kPeerSumInboxLines * 8);
    rank.slices = Zeros(kSlicedSumBytes);
    rank.row_inbox = Zeros(kPeerRowInboxLines * 8);
    rank.counters = Zeros((kPeerSumCounters + kSlicedSumCtas + kPeerRowCtas + 1) * 4);
    rank.gave_up = PinnedBuffer::Allocate(4).value();
    *rank.gave_up.template As<uint32_t>() = 0;
    ASSERT_EQ(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    Rank& rank = ranks[r];
    uint32_t* const counters = rank.counters.template As<uint32_t>();
    rank.end = {.rank = static_cast<int>(r),
                .num_ranks = static_cast<int>(ranks.size()),
                .inboxes = {},
                .slices = {},
                .row_inboxes = {},
                .calls = counters,
                .sliced_calls = counters + kPeerSumCounters,
                .row_turns = counters + kPeerSumCounters + kSlicedSumCtas,
                .gave_up = counters + kPeerSumCounters + kSlicedSumCtas + kPeerRowCtas,
                .gave_up_host = rank.gave_up.template As<uint32_t>(),
                .patience_ns = patience_ns};
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      rank.end.inboxes[peer] = ranks[peer].inbox.template As<uint64_t>();
      rank.end.slices[peer] = ranks[peer].slices.data();
      rank.end.row_inboxes[peer] = ranks[peer].row_inbox.template As<uint64_t>();
    }
  }
}

// Waits for all devices of the ranks.
template <typename Rank>
void AwaitAll(const std::vector<Rank>& ranks) {
  for (const Rank& rank : ranks) {
    rank.Use();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
}

}  // namespace kvasir::kernels
