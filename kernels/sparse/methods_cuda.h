// The list of sparse methods that have kernels for GPUs, beside methods.h. A method with them needs
// its header and its name in methods_cuda.cc; its .cu and _cuda.cc files are built without a line
// elsewhere. Its Selector says so, too, in every build (Selector::SupportsGpu). Thread-safe. Only
// in builds with CUDA.
#pragma once

#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"

namespace kvasir::kernels {

// Names are those of methods.h; `make` has the contract of SelectorMethod::make.
struct CudaSelectorMethod {
  absl::string_view name;
  absl::StatusOr<std::unique_ptr<CudaSelector>> (*make)(const MethodOptions& options);
};

struct CudaPrunerMethod {
  absl::string_view name;
  std::unique_ptr<CudaPruner> (*make)();
};

struct CudaTerminatorMethod {
  absl::string_view name;
  absl::StatusOr<std::unique_ptr<CudaTerminator>> (*make)(const MethodOptions& options);
};

std::span<const CudaSelectorMethod> CudaSelectorMethods();
std::span<const CudaPrunerMethod> CudaPrunerMethods();
std::span<const CudaTerminatorMethod> CudaTerminatorMethods();

// UNIMPLEMENTED for a name that is not listed.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaSelector(absl::string_view name,
                                                               const MethodOptions& options = {});
absl::StatusOr<std::unique_ptr<CudaPruner>> MakeCudaPruner(absl::string_view name);
absl::StatusOr<std::unique_ptr<CudaTerminator>> MakeCudaTerminator(
    absl::string_view name, const MethodOptions& options = {});

}  // namespace kvasir::kernels
