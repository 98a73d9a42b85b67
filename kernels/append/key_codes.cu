// Key codes of whole blocks on the GPU: one CTA a page, one warp a token.
#include "kernels/append/key_codes.cuh"
#include "kernels/append/key_codes_cuda.h"
#include "kernels/base/cuda_status.h"
#include "kernels/paged/page_elements.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 8 * kWarpThreads;

struct EncodeLaunch {
  KvLayout layout;
  const PageRef* pages;
  std::byte* const* key_codes;
  const int32_t* rows;
};

template <typename Keys>
__global__ void EncodeKernel(const __grid_constant__ EncodeLaunch p) {
  const int64_t row = p.rows[blockIdx.x / p.layout.pages_per_block()];
  const int64_t page = blockIdx.x % p.layout.pages_per_block();
  const Keys keys(p.layout, p.pages[row * p.layout.pages_per_block() + page].page());
  const std::byte* codes = p.key_codes[row] + page * p.layout.page_key_codes_bytes();
  for (int64_t t = threadIdx.x / kWarpThreads; t < kPageTokens; t += kThreads / kWarpThreads) {
    EncodeKey(
        p.layout, [&](int64_t i) { return keys.At(t, i); }, TokenCodes(p.layout, codes, t));
  }
}

}  // namespace

absl::Status EncodePages(const KvLayout& layout, const PageRef* pages, std::byte* const* key_codes,
                         std::span<const int32_t> rows, cudaStream_t stream) {
  if (rows.empty()) return absl::OkStatus();
  const EncodeLaunch launch = {
      .layout = layout, .pages = pages, .key_codes = key_codes, .rows = rows.data()};
  const auto blocks = static_cast<unsigned>(std::ssize(rows) * layout.pages_per_block());
  const cudaError_t error = ForKeys(layout.dtype, [&]<typename Keys>() {
    EncodeKernel<Keys><<<blocks, kThreads, 0, stream>>>(launch);
    return cudaGetLastError();
  });
  return CudaStatus(error, "launching encode_pages");
}

}  // namespace kvasir::kernels
