#include "worker/backend/cuda/cuda_limits.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "proto/selector_field.h"
#include "worker/batch/policy_stages.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

template <typename... Args>
absl::Status NotOnGpu(const Args&... args) {
  return absl::UnimplementedError(absl::StrCat("--device=cuda: ", args...));
}

// Returns "a, b and c": the selectors whose GPU support satisfies `is_listed`.
template <typename Predicate>
std::string SelectorsWith(const Predicate& is_listed) {
  std::vector<absl::string_view> names;
  for (const kernels::SelectorMethod& method : kernels::SelectorMethods()) {
    const auto selector = method.make({});
    if (selector.ok() && is_listed((*selector)->SupportsGpu())) names.push_back(method.name);
  }
  std::string list;
  for (size_t i = 0; i < names.size(); ++i) {
    const char* const before = i == 0 ? "" : i + 1 == names.size() ? " and " : ", ";
    absl::StrAppend(&list, before, names[i]);
  }
  return list;
}

int64_t GroupOf(const TransformerOptions& model) {
  return model.config.num_heads / model.config.num_kv_heads;
}

// Refuses a method for models with larger groups than its kernels serve.
absl::Status CheckGroup(const std::string& method, const TransformerOptions& model) {
  const int64_t group = GroupOf(model);
  if (group <= kernels::kMaxCudaGroup) return absl::OkStatus();
  return NotOnGpu(
      method, " is asked for, and ", group, " query heads of the model share a KV head; ", method,
      " serves at most ", kernels::kMaxCudaGroup, "; there, larger groups have ",
      SelectorsWith([](const kernels::GpuSupport& other) { return other.runs && other.any_group; }),
      ", without top_p and art");
}

absl::Status CheckSelector(const v1::AttentionPolicy& policy, const TransformerOptions& model,
                           bool on_demand) {
  const std::string name = v1::SelectorName(policy);
  KVASIR_ASSIGN_OR_RETURN(const auto selector,
                          kernels::MakeSelector(name, SelectorOptions(policy)));
  const kernels::GpuSupport support = selector->SupportsGpu();
  if (!support.runs) {
    return NotOnGpu("the selector is ", name, "; there are ",
                    SelectorsWith([](const kernels::GpuSupport& other) { return other.runs; }));
  }
  if (!support.options.ok()) return NotOnGpu(support.options.message());
  if (!support.any_group) KVASIR_RETURN_IF_ERROR(CheckGroup(name, model));
  if (on_demand && support.reads_keys) {
    return NotOnGpu("the selector ", name, " reads the keys of pages, which lie on disk with ",
                    "--kv-on-demand-size-gb; there are ",
                    SelectorsWith([](const kernels::GpuSupport& other) {
                      return other.runs && !other.reads_keys;
                    }));
  }
  if (policy.reuse().rule().empty() || support.reuses) return absl::OkStatus();
  return NotOnGpu("selections of ", name, " are reused; those of ",
                  SelectorsWith([](const kernels::GpuSupport& other) { return other.reuses; }),
                  " can be");
}

absl::Status CheckPart(const v1::AttentionPolicy& policy, const TransformerOptions& model,
                       bool on_demand) {
  KVASIR_RETURN_IF_ERROR(CheckSelector(policy, model, on_demand));
  if (policy.top_p() != 0) KVASIR_RETURN_IF_ERROR(CheckGroup("top_p", model));
  if (policy.has_art()) KVASIR_RETURN_IF_ERROR(CheckGroup("art", model));
  if (policy.quality().min_mass() != 0) {
    return NotOnGpu("min_mass is ", policy.quality().min_mass(), "; it must be 0");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCudaDevice(const CudaDevice& device) {
  constexpr size_t kKernelKib = 227;
  const std::string capability = absl::StrCat(device.major, ".", device.minor);
  if (device.major < 9) {
    return NotOnGpu(device.name, " has compute capability ", capability,
                    "; kernels need 9.0 or later, which is Hopper and after");
  }
  if (device.shared_bytes < kKernelKib * 1024) {
    return NotOnGpu(device.name, " has ", device.shared_bytes / 1024,
                    " KiB of shared memory for a block; kernels need ", kKernelKib);
  }
  if (!device.has_kernels) {
    return NotOnGpu("this program has no kernels for ", device.name, " (compute capability ",
                    capability, "); build it with -DKVASIR_CUDA_ARCHITECTURES=", device.major,
                    device.minor);
  }
  return absl::OkStatus();
}

absl::Status CheckCudaModel(const TransformerOptions& model, DType kv_dtype) {
  if (model.dtype != DType::kBFloat16) {
    return NotOnGpu("the model computes in ", DTypeName(model.dtype), "; use --dtype=bfloat16");
  }
  if (kv_dtype == DType::kFloat32) {
    return NotOnGpu("the KV is ", DTypeName(kv_dtype),
                    "; use --kv-cache-dtype=bfloat16, fp8_e4m3 or int8");
  }
  if (model.weights != kernels::WeightForm::kAsInput) {
    return NotOnGpu("weights are kept in int8; use --weights-dtype=auto");
  }
  const int64_t head_dim = model.config.head_dim;
  if (head_dim != 64 && head_dim != 128) {
    return NotOnGpu("head_dim of the model is ", head_dim,
                    "; it must be 64 or 128, or the model is served by --device=cpu");
  }
  return absl::OkStatus();
}

absl::Status CheckCudaPolicies(std::span<const v1::SparsityPolicy> policies,
                               const TransformerOptions& model, bool on_demand) {
  for (const v1::SparsityPolicy& policy : policies) {
    KVASIR_RETURN_IF_ERROR(CheckPart(policy.prefill(), model, on_demand));
    KVASIR_RETURN_IF_ERROR(CheckPart(policy.decode(), model, on_demand));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
