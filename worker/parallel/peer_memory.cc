#include "worker/parallel/peer_memory.h"

#include <cuda_runtime_api.h>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "spdlog/spdlog.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "worker/parallel/gather_values.h"

namespace kvasir::worker {

using kernels::CudaStatus;

namespace {

// IPC shares a whole allocation of the driver, and smaller allocations would share one.
constexpr int64_t kGranule = 2 << 20;

// Distinguishes processes, also where their ids are those of containers.
int64_t ThisProcess() {
  static const int64_t kToken = [] {
    std::random_device random;
    return (static_cast<int64_t>(random()) << 32) | static_cast<int64_t>(random());
  }();
  return kToken;
}

}  // namespace

struct PeerMemory::Card {
  int64_t process = 0;
  int64_t device = 0;   // of that process
  int64_t address = 0;  // in it
  cudaIpcMemHandle_t handle = {};
};

absl::Status PeerMemory::MakeCard(Card& card) const {
  int device = 0;
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
  card = {.process = ThisProcess(),
          .device = device,
          .address = reinterpret_cast<int64_t>(own_.data()),
          .handle = {}};
  return CudaStatus(cudaIpcGetMemHandle(&card.handle, own_.data()), "sharing memory with peers");
}

absl::Status PeerMemory::Open(const Card& card, int rank) {
  std::byte*& address = addresses_[static_cast<size_t>(rank)];
  if (card.process != ThisProcess()) {
    void* opened = nullptr;
    KVASIR_RETURN_IF_ERROR(
        CudaStatus(cudaIpcOpenMemHandle(&opened, card.handle, cudaIpcMemLazyEnablePeerAccess),
                   absl::StrCat("opening the memory of rank ", rank)));
    address = static_cast<std::byte*>(opened);
    opened_.push_back(address);
    return absl::OkStatus();
  }
  int device = 0;
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
  address = reinterpret_cast<std::byte*>(card.address);
  if (card.device == device) return absl::OkStatus();
  const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(card.device), 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // otherwise the next launch would report the error
    return absl::OkStatus();
  }
  return CudaStatus(error, absl::StrCat("reaching the GPU of rank ", rank));
}

absl::StatusOr<std::unique_ptr<PeerMemory>> PeerMemory::Share(int64_t bytes, Collective& ranks) {
  std::unique_ptr<PeerMemory> memory(new PeerMemory());
  memory->addresses_.resize(static_cast<size_t>(ranks.size()));
  Card own;
  absl::Status status = [&] {
    const int64_t whole = (bytes + kGranule - 1) / kGranule * kGranule;
    KVASIR_ASSIGN_OR_RETURN(memory->own_, kernels::DeviceBuffer::Allocate(whole));
    KVASIR_RETURN_IF_ERROR(CudaStatus(
        cudaMemset(memory->own_.data(), 0, static_cast<size_t>(whole)), "clearing memory"));
    KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "clearing memory"));
    return memory->MakeCard(own);
  }();
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Card> cards, GatherValues(ranks, own));
  for (int rank = 0; rank < ranks.size() && status.ok(); ++rank) {
    if (rank != ranks.rank()) status = memory->Open(cards[static_cast<size_t>(rank)], rank);
  }
  memory->addresses_[static_cast<size_t>(ranks.rank())] = memory->own_.data();
  // After this sum nobody's memory is still being cleared.
  float failures = status.ok() ? 0 : 1;
  KVASIR_RETURN_IF_ERROR(ranks.AllReduceSum(absl::MakeSpan(&failures, 1)));
  if (!status.ok()) spdlog::warn("no sums among peers: {}", std::string(status.message()));
  if (failures > 0) return std::unique_ptr<PeerMemory>();
  return memory;
}

PeerMemory::~PeerMemory() {
  for (std::byte* address : opened_) cudaIpcCloseMemHandle(address);
}

}  // namespace kvasir::worker
