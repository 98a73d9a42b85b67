#include "kernels/sparse/methods_cuda.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/all/all_cuda.h"
#include "kernels/sparse/art/art_cuda.h"
#include "kernels/sparse/hip/hip_cuda.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/streaming/streaming_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/top_p/top_p_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr CudaSelectorMethod kCudaSelectors[] = {
    {"all", MakeCudaAll},     {"streaming", MakeCudaStreaming},
    {"quest", MakeCudaQuest}, {"tokenselect", MakeCudaTokenSelect},
    {"hip", MakeCudaHip},     {"infinitehip", MakeCudaInfiniteHip},
};

constexpr CudaPrunerMethod kCudaPruners[] = {
    {"top_p", MakeCudaTopP},
};

constexpr CudaTerminatorMethod kCudaTerminators[] = {
    {"art", MakeCudaArt},
};

template <typename Method>
absl::StatusOr<const Method*> Find(absl::string_view kind, std::span<const Method> methods,
                                   absl::string_view name) {
  for (const Method& method : methods) {
    if (method.name == name) return &method;
  }
  return absl::UnimplementedError(
      absl::StrCat("the ", kind, " ", name, " has no kernels for GPUs"));
}

}  // namespace

std::span<const CudaSelectorMethod> CudaSelectorMethods() { return kCudaSelectors; }
std::span<const CudaPrunerMethod> CudaPrunerMethods() { return kCudaPruners; }
std::span<const CudaTerminatorMethod> CudaTerminatorMethods() { return kCudaTerminators; }

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaSelector(absl::string_view name,
                                                               const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("selector", CudaSelectorMethods(), name));
  return method->make(options);
}

absl::StatusOr<std::unique_ptr<CudaPruner>> MakeCudaPruner(absl::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("pruner", CudaPrunerMethods(), name));
  return method->make();
}

absl::StatusOr<std::unique_ptr<CudaTerminator>> MakeCudaTerminator(absl::string_view name,
                                                                   const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const auto* method, Find("terminator", CudaTerminatorMethods(), name));
  return method->make(options);
}

}  // namespace kvasir::kernels
