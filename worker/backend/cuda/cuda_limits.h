// Checks for what a worker on a GPU cannot do yet, at its start: CheckCudaDevice for the GPU
// itself, CheckCudaModel before weights are read, CheckCudaPolicies before memory is taken for an
// engine. Called by the CUDA backend. They are in every build, so that refusals are tested on
// machines without a GPU. What a selector refuses it says itself (Selector::SupportsGpu). Functions
// without state. All errors are UNIMPLEMENTED and say what to change.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/backend/backend.h"
#include "worker/checkpoint/transformer_options.h"

namespace kvasir::worker {

// Checks the compute capability of the GPU called `name`.
absl::Status CheckCudaDevice(absl::string_view name, int major, int minor);

absl::Status CheckCudaModel(const TransformerOptions& model, kernels::DType kv_dtype);

// REQUIRES: the policies' selectors and their options exist.
absl::Status CheckCudaPolicies(std::span<const v1::SparsityPolicy> policies,
                               const TransformerOptions& model);

}  // namespace kvasir::worker
