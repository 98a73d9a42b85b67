// Facts of a model that are fixed when a worker loads it: configuration, slices, dtypes and
// positions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm.h"
#include "kernels/paged/grouped_positions.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/shard_plan.h"

namespace kvasir::worker {

// Method of reading contexts beyond the trained window (--position-extension).
enum class PositionExtension : uint8_t {
  kNone,        // off: keys are cached rotated, positions are the model's own
  kStreaming,   // keys are cached un-rotated and attended to at compact positions
  kSelfExtend,  // keys are cached un-rotated and attended to at grouped positions
};

struct TransformerOptions {
  ModelConfig config;
  ShardPlan shard;
  kernels::DType dtype = kernels::DType::kFloat32;              // of weights and activations
  kernels::WeightForm weights = kernels::WeightForm::kAsInput;  // of linear layers
  int64_t max_model_len = 0;
  PositionExtension extension = PositionExtension::kNone;
  kernels::GroupedPositions grouped = {};  // of kSelfExtend; otherwise off

  // Length of the longest sequence whose positions the model sees; selections handle the rest.
  int64_t longest_position_range() const {
    return extension == PositionExtension::kNone
               ? max_model_len
               : std::min(max_model_len, config.max_position_embeddings);
  }
};

}  // namespace kvasir::worker
