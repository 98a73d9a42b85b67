#include "worker/parallel/nccl_communicator.h"

#include <chrono>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "worker/parallel/gather_values.h"

namespace kvasir::worker {

using kernels::MutexLock;

namespace {

// Finding the machine's links and connecting the ranks takes seconds.
constexpr absl::Duration kJoinPatience = absl::Seconds(60);

absl::Status NcclStatus(ncclResult_t result, absl::string_view what, int rank) {
  if (result == ncclSuccess) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("NCCL, ", what, " on rank ", rank, ": ", ncclGetErrorString(result)));
}

// Sets variables before NCCL is first used, which is when it reads its environment.
void SetEnvironment() {
  // Values that a user has set are kept.
  constexpr int kKeep = 0;
  // NVLink multicast is state of the switch, which all GPUs of a host share: a program that dies
  // while it is being set up can leave them out of service, also for others.
  setenv("NCCL_NVLS_ENABLE", "0", kKeep);
  // Registering the buffers of captured calls takes all ranks, and then uses another kernel. Ranks
  // record their steps independently, so one may capture what another launches.
  setenv("NCCL_GRAPH_REGISTER", "0", kKeep);
}

// Sends rank 0's id to all ranks.
absl::StatusOr<ncclUniqueId> ShareId(Collective& ranks) {
  struct Card {
    int64_t has_id = 0;
    ncclUniqueId id = {};
  };
  Card own;
  ncclResult_t made = ncclSuccess;
  if (ranks.rank() == 0) made = ncclGetUniqueId(&own.id);
  own.has_id = made == ncclSuccess ? 1 : 0;
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Card> cards, GatherValues(ranks, own));
  KVASIR_RETURN_IF_ERROR(NcclStatus(made, "making an id", ranks.rank()));
  if (cards[0].has_id == 0) return absl::UnavailableError("rank 0 cannot make an id for NCCL");
  return cards[0].id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Join(Collective& ranks) {
  SetEnvironment();
  KVASIR_ASSIGN_OR_RETURN(const ncclUniqueId id, ShareId(ranks));
  std::unique_ptr<NcclCommunicator> joined(new NcclCommunicator(ranks.rank(), ranks.timeout()));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t result =
      ncclCommInitRankConfig(&comm, ranks.size(), id, ranks.rank(), &config);
  {
    MutexLock lock(joined->mu_);
    joined->comm_ = comm;
  }
  KVASIR_RETURN_IF_ERROR(joined->Settle(result, "joining the ranks", kJoinPatience));
  return joined;
}

template <typename Call>
absl::StatusOr<ncclResult_t> NcclCommunicator::Make(const Call& call) const {
  MutexLock lock(mu_);
  if (comm_ != nullptr) return call(comm_);
  return absl::FailedPreconditionError("the ranks' communicator was aborted");
}

absl::Status NcclCommunicator::Settle(ncclResult_t result, absl::string_view what,
                                      absl::Duration patience) const {
  const auto start = std::chrono::steady_clock::now();
  while (result == ncclInProgress) {
    KVASIR_ASSIGN_OR_RETURN(const ncclResult_t asked, Make([&](ncclComm_t comm) {
                              return ncclCommGetAsyncError(comm, &result);
                            }));
    KVASIR_RETURN_IF_ERROR(NcclStatus(asked, what, rank_));
    if (absl::FromChrono(std::chrono::steady_clock::now() - start) > patience) {
      return absl::DeadlineExceededError(absl::StrCat("NCCL, ", what, " on rank ", rank_,
                                                      ": another rank was silent for ",
                                                      absl::FormatDuration(patience)));
    }
  }
  return NcclStatus(result, what, rank_);
}

absl::Status NcclCommunicator::AllReduce(void* data, int64_t count, ncclDataType_t type,
                                         ncclRedOp_t op, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const ncclResult_t result, Make([&](ncclComm_t comm) {
                            return ncclAllReduce(data, data, static_cast<size_t>(count), type, op,
                                                 comm, stream);
                          }));
  return Settle(result, "all-reduce", patience_);
}

absl::Status NcclCommunicator::AllReduceSum(float* data, int64_t count, cudaStream_t stream) {
  return AllReduce(data, count, ncclFloat32, ncclSum, stream);
}

absl::Status NcclCommunicator::AllReduceSum(int64_t* data, int64_t count, cudaStream_t stream) {
  return AllReduce(data, count, ncclInt64, ncclSum, stream);
}

absl::Status NcclCommunicator::AllReduceMax(uint32_t* data, int64_t count, cudaStream_t stream) {
  return AllReduce(data, count, ncclUint32, ncclMax, stream);
}

absl::Status NcclCommunicator::AllGather(const void* in, void* out, int64_t bytes,
                                         cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const ncclResult_t result, Make([&](ncclComm_t comm) {
                            return ncclAllGather(in, out, static_cast<size_t>(bytes), ncclInt8,
                                                 comm, stream);
                          }));
  return Settle(result, "all-gather", patience_);
}

absl::Status NcclCommunicator::Health() const {
  ncclResult_t result = ncclSuccess;
  KVASIR_ASSIGN_OR_RETURN(const ncclResult_t asked, Make([&](ncclComm_t comm) {
                            return ncclCommGetAsyncError(comm, &result);
                          }));
  KVASIR_RETURN_IF_ERROR(NcclStatus(asked, "asking", rank_));
  return NcclStatus(result, "a collective", rank_);
}

NcclCommunicator::~NcclCommunicator() {
  BeginAbort();
  if (aborting_.joinable()) aborting_.join();
}

// Runs on a thread of its own: NCCL tells its kernels to end, and then waits until all graphs with
// calls of its own are destroyed. Those can be destroyed only when they have ended.
void NcclCommunicator::BeginAbort() {
  MutexLock lock(mu_);
  ncclComm_t const comm = std::exchange(comm_, nullptr);
  if (comm != nullptr) aborting_ = std::thread([comm] { ncclCommAbort(comm); });
}

}  // namespace kvasir::worker
