// Checks for what a worker on a GPU cannot do yet, at its start: CheckCudaDevice for the GPU
// itself, CheckCudaModel before weights are read, CheckCudaPolicies before memory is taken for an
// engine. Called by the CUDA backend. They are in every build, so that refusals are tested on
// machines without a GPU. What a selector refuses it says itself (Selector::SupportsGpu). Functions
// without state. All errors are UNIMPLEMENTED and say what to change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/backend/backend.h"
#include "worker/checkpoint/transformer_options.h"

namespace kvasir::worker {

struct CudaDevice {
  absl::string_view name;
  int major = 0, minor = 0;  // of its compute capability
  size_t shared_bytes = 0;   // of shared memory that a block may take
  bool has_kernels = false;  // whether the program was built for it
};
absl::Status CheckCudaDevice(const CudaDevice& device);

absl::Status CheckCudaModel(const TransformerOptions& model, kernels::DType kv_dtype);

// `on_demand`: pages may lie on disk only. A GPU brings them for attention, so selectors that read
// keys where they lie are refused then. REQUIRES: the policies' selectors and their options exist.
absl::Status CheckCudaPolicies(std::span<const v1::SparsityPolicy> policies,
                               const TransformerOptions& model, bool on_demand);

}  // namespace kvasir::worker
