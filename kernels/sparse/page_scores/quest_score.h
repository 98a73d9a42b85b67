// The scores of QuestSelector, in their own header so that vector code and the plain reference can
// be compared. With q split by sign, for Quest's bound into (min(q, 0), max(q, 0)), the score that
// quest_rule.h defines is one dot product
//
//   score = (for min, for max) . (min, max)
//
// of 2 * head_dim terms, and (min, max) is how a page's bounds lie in memory.
//
// This header is included by files compiled with instructions that the machine may lack (see
// base/simd_units.h), so it holds plain data only. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

inline constexpr int64_t kQuestScorePages = 64;  // most pages of a call

struct QuestScoreParams {
  // [num_queries, 2 * head_dim]: for min, then for max; of the function's query type.
  const void* signed_q = nullptr;
  int64_t num_queries = 0;
  int64_t head_dim = 0;
  std::byte* workspace = nullptr;  // QuestScoreWorkspaceBytes(head_dim), 64-byte aligned
};

constexpr int64_t QuestScoreWorkspaceBytes(int64_t head_dim) {
  return 2 * head_dim * kQuestScorePages * 4;
}

// scores[i] = max over the queries of signed_q . bounds[i], in float32, a NaN counting as -inf.
// -inf where bounds[i] is null. A page's score does not depend on the pages beside it.
using QuestScoreFn = void(const QuestScoreParams& params,
                          const std::byte* const bounds[kQuestScorePages],
                          float scores[kQuestScorePages]);

// Float32 queries; any head_dim.
QuestScoreFn QuestScoresFloat32;   // float32 bounds
QuestScoreFn QuestScoresBFloat16;  // bfloat16 bounds

inline constexpr int64_t kQuestScoreHeadDimStep = 16;  // of the vector functions

// Float32 queries; the same bits for every instruction set.
QuestScoreFn QuestScoresNeonFloat32;  // float32 bounds
QuestScoreFn QuestScoresAvx2Float32;
QuestScoreFn QuestScoresAvx512Float32;
QuestScoreFn QuestScoresNeonBFloat16;  // bfloat16 bounds
QuestScoreFn QuestScoresAvx2BFloat16;
QuestScoreFn QuestScoresAvx512BFloat16;
// Bfloat16 queries and bounds.
QuestScoreFn QuestScoresAvx512Bf16Pairs;

}  // namespace kvasir::kernels
