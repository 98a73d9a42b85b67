// Selectors on the GPU by name, for tests that are of many of them.
#pragma once

#include <cuda_runtime_api.h>
#include <string>

#include "kernels/sparse/hip/hip_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {

struct DeviceMethodOptions {
  std::string selector;     // quest, tokenselect, hip or infinitehip
  std::string preset = {};  // of infinitehip
  Scope scope = Scope::kKvGroup;
  int64_t tiles = 0;  // of a call
  int64_t max_budget_tokens = 0;
  cudaStream_t stream = nullptr;
};

struct DeviceMethod {
  int64_t workspace_bytes = 0;
  DeviceSelect select;
};

// For a KV of this form, with so many query heads a KV head.
inline DeviceMethod MakeDeviceMethod(const DeviceMethodOptions& options, const PagedKv& kv,
                                     int64_t group) {
  const cudaStream_t stream = options.stream;
  const Scope scope = options.scope;
  if (options.selector == "quest") {
    return {QuestWorkspaceBytes(kv, options.tiles),
            [=](const auto& params, const auto& out, auto* memory) {
              return SelectQuest(QuestScore::kEstimate, params, out, memory, stream);
            }};
  }
  if (options.selector == "tokenselect") {
    return {TokenSelectWorkspaceBytes(scope, kv, group, options.tiles),
            [=](const auto& params, const auto& out, auto* memory) {
              return SelectTokens(scope, params, out, memory, stream);
            }};
  }
  if (options.selector == "hip") {
    const HipCuda method = {.max_budget_tokens = options.max_budget_tokens};
    return {HipWorkspaceBytes(method, kv, options.tiles),
            [=](const auto& params, const auto& out, auto* memory) {
              return SelectHip(method, params, out, memory, stream);
            }};
  }
  const InfiniteHipCuda method = {.preset = InfiniteHipSelector::FindPreset(options.preset).value(),
                                  .max_budget_tokens = options.max_budget_tokens,
                                  .scope = scope};
  return {InfiniteHipWorkspaceBytes(method, kv, options.tiles),
          [=](const auto& params, const auto& out, auto* memory) {
            return SelectInfiniteHip(method, params, out, memory, stream);
          }};
}

}  // namespace kvasir::kernels
