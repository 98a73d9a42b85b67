// List of a rank's weights: the tensors of a checkpoint, with their names and whole shapes, the
// slice of each that the rank takes, and its target. It hides names and layouts of checkpoints, and
// shards. Read by weights.cc, which fills the targets from files, and by dummy_weights.cc.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/weights.h"

namespace kvasir::worker {

// A tensor that the checkpoint must have, and this rank's use of it.
struct WeightPart {
  std::string name;
  std::vector<int64_t> shape;
  MatrixSlice slice = {};    // empty: it belongs to another rank
  Tensor* target = nullptr;  // null when the slice is empty
  int64_t target_row = 0;    // where the slice begins in the target
};

inline constexpr char kModelPrefix[] = "model.";

// Differences between checkpoints of the same model.
struct CheckpointForm {
  bool has_lm_head = true;            // else the head is the embedding
  std::string prefix = kModelPrefix;  // before the names of all tensors except the head's
};

class WeightsLayout {
 public:
  // Gives targets their shapes; their memory comes later. The references outlive the layout.
  WeightsLayout(const ModelConfig& config, const ShardPlan& plan, const CheckpointForm& form,
                ModelWeights& weights);

  const std::vector<WeightPart>& parts() const { return parts_; }
  const std::vector<Tensor*>& targets() const { return targets_; }

 private:
  void Declare(Tensor& target, std::initializer_list<int64_t> shape);
  // A whole tensor.
  void AddVector(const std::string& name, int64_t size, Tensor& target);
  void AddMatrix(const std::string& name, int64_t rows, int64_t cols, Tensor& target);
  // Adds some rows of a matrix, or elements of a vector.
  void AddRows(const std::string& name, std::vector<int64_t> shape, IndexRange rows, Tensor& target,
               int64_t target_row);
  void AddCols(const std::string& name, int64_t rows, int64_t cols, IndexRange part,
               Tensor& target);
  // Returns the rows of `heads` in a projection to heads of head_dim each.
  IndexRange HeadRows(IndexRange heads) const;
  void AddAttention(const std::string& prefix, LayerWeights& layer);
  void AddQkv(const std::string& attention, LayerWeights& layer);
  void AddMlp(const std::string& prefix, LayerWeights& layer);

  const ModelConfig& config_;
  const ShardPlan& plan_;
  std::vector<WeightPart> parts_;
  std::vector<Tensor*> targets_;
};

// For a model without a head of its own: makes the head a view of the rank's rows of the embedding,
// without memory. REQUIRES: the embedding has its memory.
void TieHead(const ModelConfig& config, const ShardPlan& plan, ModelWeights& weights);

}  // namespace kvasir::worker
