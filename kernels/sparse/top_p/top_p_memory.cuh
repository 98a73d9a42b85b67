// Memory of a CTA of the top-p kernel: a fixed part, and after it arrays whose sizes follow from
// how LaunchTopP divides the rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged/row_items.h"
#include "kernels/sparse/key_logits/key_code_logits.cuh"
#include "kernels/sparse/top_p/top_p_launch.h"
#include "kernels/sparse/top_p/top_p_plan.h"
#include "kernels/sparse/top_p/top_p_threshold.cuh"

namespace kvasir::kernels {

// More threads would leave each too few registers.
inline constexpr int kTopPThreads = 512;

// The tokens of one page that are estimated.
struct TopPItem {
  uint64_t tokens;
  uint64_t live;            // of the entry
  const std::byte* codes;   // null: the page is absent
  ItemPositions positions;  // of its tokens
  uint32_t slot;            // place of its first token's weights; those of the others follow
};

template <int kHeadDim>
struct TopPWarpMemory {
  StagedKeys<kHeadDim> keys;
  float2 logits[kProductQueries][kWarpThreads / 2];  // of the same keys
};

// Shared memory of a CTA.
template <int kHeadDim>
struct TopPMemory {
  DeviceRow row;
  uint32_t tile;  // of the row
  SelectionHeader header;
  StagedQueries<kHeadDim> queries;
  TopPWarpMemory<kHeadDim> of_warps[kTopPThreads / kWarpThreads];
  ThresholdMemory<kTopPThreads> search;
  int64_t num_mandatory;            // tokens of sink and window
  int64_t num_items;                // of the CTA
  float* weights[kMaxCudaGroup];    // of each head, in the shared memory of its CTA
  float* others[kMaxCudaGroup];     // in device memory: those of slots from shared_tokens on
  float thresholds[kMaxCudaGroup];  // from the heads' CTAs
  uint32_t num_competing;           // of the row: in the cluster's first CTA
  uint32_t num_tokens;              // tokens that are estimated at once

  // The arrays after it.
  // Weights of the CTA's heads, [heads_of_block, shared_tokens].
  __device__ float* Weights() { return reinterpret_cast<float*>(this + 1); }
  // [items_at_once]
  __device__ TopPItem* Items(const TopPLaunch& p) {
    return reinterpret_cast<TopPItem*>(Weights() + p.heads_of_block * p.shared_tokens);
  }
  // Listed tokens, [items_at_once, kPageTokens]: item * kPageTokens + token in the page.
  __device__ uint16_t* Tokens(const TopPLaunch& p) {
    return reinterpret_cast<uint16_t*>(Items(p) + p.items_at_once);
  }
  // One bit per slot in shared memory: whether head `g` keeps it. Arrays of all heads of the group.
  __device__ uint32_t* KeptBy(const TopPLaunch& p, int g) {
    auto* const kept = reinterpret_cast<uint32_t*>(Tokens(p) + p.items_at_once * kPageTokens);
    return kept + g * KeptWords(p.shared_tokens);
  }

  // Bytes with the arrays.
  static int64_t Bytes(const TopPLaunch& p) {
    static_assert(sizeof(TopPMemory) + kSharedWeights * sizeof(float) +
                      kMostItems * (sizeof(TopPItem) + kPageTokens * sizeof(uint16_t)) +
                      kMaxCudaGroup * kSharedWeights / 8 <=
                  227 * 1024);
    return static_cast<int64_t>(sizeof(TopPMemory)) +
           p.heads_of_block * p.shared_tokens * static_cast<int64_t>(sizeof(float)) +
           p.items_at_once *
               static_cast<int64_t>(sizeof(TopPItem) + kPageTokens * sizeof(uint16_t)) +
           p.select.group * KeptWords(p.shared_tokens) * static_cast<int64_t>(sizeof(uint32_t));
  }

 private:
  // Number of words with one bit per slot.
  KVASIR_HOST_DEVICE static uint32_t KeptWords(uint32_t shared_tokens) {
    return (shared_tokens + kWarpThreads - 1) / kWarpThreads;
  }
};

}  // namespace kvasir::kernels
