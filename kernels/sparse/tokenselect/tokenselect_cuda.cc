#include "kernels/sparse/tokenselect/tokenselect_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/tokenselect/tokenselect_launch.h"

namespace kvasir::kernels {
namespace {

// Pages of a row for each block of threads, as long as there are no more blocks than kVoteBlocks.
constexpr int64_t kPagesOfBlock = 16;

// Returns the bytes of it all.
int64_t LayOut(std::byte* workspace, const PagedKv& kv, int64_t group, int64_t rows,
               TokenSelectLaunch& launch) {
  const int64_t pages = kv.max_blocks_per_slot;
  launch.max_tokens = pages * kPageTokens;
  // Whatever the batch: how a row is cut decides how its sums are rounded.
  launch.blocks_of_row =
      std::clamp<int64_t>((pages + kPagesOfBlock - 1) / kPagesOfBlock, 1, kVoteBlocks);
  const int64_t tokens = rows * launch.max_tokens;
  ScratchPieces pieces(workspace);
  launch.parts = pieces.Take<SoftmaxSum>(rows * launch.blocks_of_row * group);
  launch.votes = pieces.Take<uint32_t>(tokens);
  launch.bins = pieces.Take<uint32_t>(rows * kVoteBins);
  launch.num_close = pieces.Take<uint32_t>(rows);
  launch.chosen = pieces.Take<uint64_t>(rows * pages);
  launch.equal = pieces.Take<uint64_t>(rows * pages);
  launch.logits = pieces.Take<float>(tokens * std::max<int64_t>(group, 2));
  launch.close = reinterpret_cast<uint32_t*>(launch.logits);
  launch.close_votes = launch.close + tokens;
  return pieces.bytes();
}

}  // namespace

int64_t TokenSelectWorkspaceBytes(const PagedKv& kv, int64_t group, int64_t blocks) {
  TokenSelectLaunch launch;
  return LayOut(nullptr, kv, group, blocks * kv.layout.num_kv_heads, launch);
}

absl::Status SelectTokens(const SelectParams& params, const PageSelection& out,
                          std::byte* workspace, cudaStream_t stream) {
  KVASIR_ASSIGN_OR_RETURN(const SelectLaunch select,
                          MakeSelectLaunch("tokenselect", params, out, workspace));
  KVASIR_RETURN_IF_ERROR(RequirePlacedQueries("tokenselect", params));
  if (select.group > kMaxCudaGroup) {
    return absl::InvalidArgumentError(absl::StrCat("tokenselect on the GPU: ", select.group,
                                                   " query heads a KV head; it serves at most ",
                                                   kMaxCudaGroup));
  }
  if (params.blocks.empty()) return absl::OkStatus();
  TokenSelectLaunch launch = {.select = select, .faults = params.faults.data()};
  LayOut(workspace, params.kv, select.group, out.num_rows, launch);
  return CudaStatus(LaunchTokenSelect(launch, stream), "launching tokenselect");
}

}  // namespace kvasir::kernels
