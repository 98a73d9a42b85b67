// The stages of the declared policies: one object per shape. Policies that differ only in numbers
// share it, because numbers come with the rows. Hides which policies a model cannot serve and how
// stages are made. Filled by the engine at its start, constant afterwards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/backend/backend.h"
#include "worker/batch/step_batch.h"
#include "worker/model/transformer.h"

namespace kvasir::worker {

class SelectorTable {
 public:
  // Returns the index of the policy's stages, which are made when no policy before it has its
  // shape. INVALID_ARGUMENT when the model cannot be served with them.
  absl::StatusOr<int64_t> Add(const v1::AttentionPolicy& policy, const TransformerOptions& model);
  // Prepares the backend for all stages. REQUIRES: called once, after the last Add.
  absl::Status Prepare(const Backend& backend);

  std::span<const ServedSelector> all() const { return served_; }
  const ServedSelector& at(int64_t index) const { return served_[static_cast<size_t>(index)]; }
  // Whether any stage reads codes of keys.
  bool NeedsKeyCodes() const;

 private:
  std::vector<ServedSelector> served_;
  std::vector<v1::AttentionPolicy> shapes_;  // of served_ (policy_stages.h)
};

}  // namespace kvasir::worker
