// The policies that the engine's tests on a GPU serve, by number, and the engine's options with
// them.
#pragma once

#include <cstdint>

#include "tests/worker/test_worker.h"

namespace kvasir::worker {

inline constexpr int64_t kSlots = 16;
inline constexpr int64_t kChunk = 256;  // of a prompt in a step

inline v1::SparsityPolicy MakeInfiniteHip() {
  v1::SparsityPolicy policy = MakePolicy("infinitehip", "infinitehip");
  policy.mutable_prefill()->mutable_infinitehip()->set_preset("5k");
  policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  return policy;
}

inline v1::SparsityPolicy MakeEnding(v1::SparsityPolicy policy) {
  policy.mutable_decode()->mutable_art()->set_guard("none");  // bounds seldom let a row end so soon
  return policy;
}

inline v1::SparsityPolicy MakeEndingByImportance() {
  v1::SparsityPolicy policy = MakeEnding(MakePolicy("all", "quest"));
  policy.mutable_decode()->mutable_art()->set_order("importance");
  return policy;
}

inline v1::SparsityPolicy MakePruning(v1::SparsityPolicy policy) {
  policy.mutable_decode()->set_top_p(1);  // each request says how much to keep
  return policy;
}

inline constexpr uint32_t kNumPolicies = 21;
inline constexpr uint32_t kFirstPruning = 6;
inline constexpr uint32_t kFirstEnding = 9;  // the first of these also prunes
inline constexpr uint32_t kAllEnding = 10;
inline constexpr uint32_t kFirstReusing = 11;  // the first of these also prunes
inline constexpr uint32_t kFirstComparing =
    17;  // the first of those that compare queries for reuse
inline constexpr uint32_t kEndingByImportance = 20;

constexpr bool Prunes(uint32_t policy) {
  return (policy >= kFirstPruning && policy < kAllEnding) || policy == kFirstReusing;
}
constexpr bool Ends(uint32_t policy) {
  return policy == kFirstEnding || policy == kAllEnding || policy == kEndingByImportance;
}
constexpr bool Reuses(uint32_t policy) {
  return policy >= kFirstReusing && policy < kEndingByImportance;
}
constexpr bool ComparesQueries(uint32_t policy) {
  return policy >= kFirstComparing && policy < kEndingByImportance;
}

inline EngineOptions Options() {
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies = {MakePolicy("all", "all"),
                      MakePolicy("quest", "quest"),
                      MakePolicy("all", "quest"),
                      MakePolicy("tokenselect", "tokenselect"),
                      MakeInfiniteHip(),
                      MakePolicy("streaming", "streaming"),
                      MakePruning(MakePolicy("all", "quest")),
                      MakePruning(MakePolicy("quest", "tokenselect")),
                      MakePruning(MakeInfiniteHip()),
                      MakeEnding(MakePruning(MakeInfiniteHip())),
                      MakeEnding(MakePolicy("all", "all")),
                      MakePruning(MakeReusingPolicy("quest", "interval")),
                      MakeReusingPolicy("quest", "interval"),
                      MakeReusingPolicy("tokenselect", "interval"),
                      MakeReusingPolicy("hip", "interval"),
                      MakeReusingPolicy("infinitehip", "interval"),
                      MakeLayerPolicy("infinitehip", "interval"),
                      MakeReusingPolicy("tokenselect", "cosine"),
                      MakeReusingPolicy("infinitehip", "both"),
                      MakeLayerPolicy("tokenselect", "cosine"),
                      MakeEndingByImportance()};
  options.kv_dtype = kernels::DType::kBFloat16;
  options.kv.device = 512 << 20;
  options.kv.host = 512 << 20;
  options.max_num_batched_tokens = kSlots * kChunk;
  return options;
}

inline constexpr kernels::GroupedPositions kGrouped = {.group_size = 4, .window = 500};

// Policies that estimate attention do not support grouped positions.
inline EngineOptions GroupedOptions() {
  EngineOptions options = Options();
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    if (Prunes(policy) || Ends(policy)) options.policies[policy] = MakePolicy("all", "all");
  }
  return options;
}

}  // namespace kvasir::worker
