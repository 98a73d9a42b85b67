// A model in a worker's memory: found, checked, hashed, cut to this rank's part and packed. It
// hides the order of these steps and which of them uses which dtype. Loaded by the group member
// when a group forms, and kept while groups of the same model and rank come and go.
// Thread-compatible.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"
#include "proto/kvasir/v1/config.pb.h"
#include "worker/backend/backend.h"
#include "worker/checkpoint/model_hash.h"
#include "worker/model/transformer.h"

namespace kvasir::worker {

struct LoadedModel {
  std::unique_ptr<Transformer> transformer;
  ModelHash weights_hash = {};
  kernels::DType kv_dtype = kernels::DType::kFloat32;
  std::string kv_form;       // as in v1::Ready
  int64_t weight_bytes = 0;  // of this rank, as loaded
};

struct LoadModelOptions {
  v1::ModelConfig model;
  v1::KvConfig kv;
  int64_t rank = 0;
  int64_t num_ranks = 1;
  // Called now and then, by one thread at a time, with the current stage and the fraction done.
  std::function<void(absl::string_view stage, double fraction)> progress;
};

// INVALID_ARGUMENT for a model that does not divide over the ranks, a context beyond the model's,
// an unknown dtype. Other errors are those of LoadModelConfig, LoadWeights (for a dummy model
// MakeDummyWeights, which reads no file except the configuration) and the backend. The backend
// outlives the model.
absl::StatusOr<LoadedModel> LoadModel(const LoadModelOptions& options, Backend& backend);

}  // namespace kvasir::worker
