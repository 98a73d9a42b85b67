// Speed of sums over the GPUs of a group, as in a decode step: 64 in a CUDA graph, one after the
// other, through NCCL and among peers. Checks each element of each size. One process per GPU.
//
//   all_reduce_bench [RANKS]      default 2
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/bench/cuda_timing.h"
#include "tests/worker/parallel/rank_processes.h"
#include "worker/parallel/gloo_collective.h"
#include "worker/parallel/nccl_communicator.h"
#include "worker/parallel/peer_sums.h"

namespace kvasir::worker {
namespace {

using kernels::BFloat16;
using kernels::Check;
using kernels::DeviceBuffer;
using kernels::DType;
using kernels::PinnedBuffer;
using kernels::TensorView;
using kernels::Value;

constexpr int kSumsInGraph = 64;

// Returns a small integer; sums over ranks are exact in bfloat16.
float Element(int64_t i, int rank) { return static_cast<float>((i % 7 + 1) * (rank + 1) % 13); }

struct Rank {
  Collective& ranks;
  std::unique_ptr<NcclCommunicator> nccl;
  std::unique_ptr<PeerSums> peers;  // may be null
  PinnedBuffer progress;
};

struct Buffers {
  explicit Buffers(int64_t count)
      : x(Value(DeviceBuffer::Allocate(count * 4))), y(Value(DeviceBuffer::Allocate(count * 2))) {}
  DeviceBuffer x, y;
};

TensorView Vector(const DeviceBuffer& buffer, DType dtype, int64_t count) {
  return TensorView(buffer.data(), dtype, {1, count}, kernels::Device::kCuda);
}

void Fill(const Buffers& b, int64_t count, int rank) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = Element(i, rank);
  Check(cudaMemcpy(b.x.data(), values.data(), values.size() * sizeof(float), cudaMemcpyDefault));
}

// Ends the process when an element is not the sum.
void ExpectSums(const std::vector<float>& found, int num_ranks, const char* way) {
  for (size_t i = 0; i < found.size(); ++i) {
    float sum = 0;
    for (int r = 0; r < num_ranks; ++r) sum += Element(static_cast<int64_t>(i), r);
    if (found[i] == sum) continue;
    std::fprintf(stderr, "%s: element %zu of %zu is %g, not %g\n", way, i, found.size(),
                 static_cast<double>(found[i]), static_cast<double>(sum));
    std::exit(1);
  }
}

void CheckNccl(const Rank& rank, int64_t count, const Buffers& b) {
  Fill(b, count, rank.ranks.rank());
  Check(rank.nccl->AllReduceSum(b.x.As<float>(), count, nullptr));
  std::vector<float> found(static_cast<size_t>(count));
  Check(cudaMemcpy(found.data(), b.x.data(), found.size() * sizeof(float), cudaMemcpyDefault));
  ExpectSums(found, rank.ranks.size(), "NCCL");
}

// Checks more often than an inbox has halves.
void CheckPeers(const Rank& rank, int64_t count, const Buffers& b) {
  Fill(b, count, rank.ranks.rank());
  for (int round = 0; round < 5; ++round) {
    Check(cudaMemset(b.y.data(), 0, static_cast<size_t>(count) * 2));
    Check(rank.peers->Add(Vector(b.x, DType::kFloat32, count), Vector(b.y, DType::kBFloat16, count),
                          rank.progress.As<uint32_t>(), nullptr));
    std::vector<BFloat16> bits(static_cast<size_t>(count));
    Check(cudaMemcpy(bits.data(), b.y.data(), bits.size() * 2, cudaMemcpyDefault));
    ExpectSums({bits.begin(), bits.end()}, rank.ranks.size(), "peers");
  }
}

void Report(const Rank& rank, const char* way, int64_t count,
            const std::function<absl::Status(cudaStream_t)>& sum) {
  const double us = kernels::MedianMicroseconds([&](cudaStream_t stream) {
                      for (int i = 0; i < kSumsInGraph; ++i) Check(sum(stream));
                    }) /
                    kSumsInGraph;
  if (rank.ranks.rank() != 0) return;
  std::printf("| %s | %d | %lld | %lld | %.2f |\n", way, rank.ranks.size(),
              static_cast<long long>(count * 2 / 1024), static_cast<long long>(count * 4 / 1024),
              us);
  std::fflush(stdout);
}

void Bench(const Rank& rank) {
  for (const int64_t count : {4096, 8192, 32768, 65536, 131072, 2097152, 33554432}) {
    const Buffers b(count);
    CheckNccl(rank, count, b);
    Check(cudaMemset(b.x.data(), 0, static_cast<size_t>(count) * sizeof(float)));
    Report(rank, "NCCL, float32", count, [&](cudaStream_t stream) {
      return rank.nccl->AllReduceSum(b.x.As<float>(), count, stream);
    });
    if (rank.peers == nullptr) continue;
    CheckPeers(rank, count, b);
    Report(rank, "peers, float32 to bfloat16", count, [&](cudaStream_t stream) {
      return rank.peers->Add(Vector(b.x, DType::kFloat32, count),
                             Vector(b.y, DType::kBFloat16, count), rank.progress.As<uint32_t>(),
                             stream);
    });
    CheckPeers(rank, count, b);
    if (rank.peers->gave_up()) {
      std::fprintf(stderr, "rank %d gave up\n", rank.ranks.rank());
      std::exit(1);
    }
  }
}

int RunRank(int rank, int size, Rendezvous& rendezvous) {
  int devices = 0;
  Check(cudaGetDeviceCount(&devices));
  if (devices < size) {
    std::fprintf(stderr, "%d ranks, but %d GPUs\n", size, devices);
    return 1;
  }
  Check(cudaSetDevice(rank));
  const std::unique_ptr<GlooCollective> ranks = Value(GlooCollective::Connect(
      {.rank = rank, .size = size, .timeout = absl::Seconds(20)}, rendezvous));
  Rank member = {.ranks = *ranks, .nccl = nullptr, .peers = nullptr, .progress = {}};
  member.nccl = Value(NcclCommunicator::Join(*ranks));
  member.peers = Value(PeerSums::Join(*ranks));
  member.progress = Value(PinnedBuffer::Allocate(sizeof(uint32_t)));
  if (rank == 0) {
    std::printf("peers reach each other's memory: %s\n", member.peers != nullptr ? "yes" : "no");
    std::printf(
        "| way | GPUs | KiB as bfloat16 | KiB as float32 | us a sum |\n|---|---|---|---|---|\n");
  }
  Bench(member);
  return 0;
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::vector<int> statuses = kvasir::worker::RunRankProcesses(
      size, [size](int rank, kvasir::worker::Rendezvous& rendezvous) {
        return kvasir::worker::RunRank(rank, size, rendezvous);
      });
  return *std::max_element(statuses.begin(), statuses.end()) == 0 ? 0 : 1;
}
