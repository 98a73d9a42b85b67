#include "worker/backend/cuda/cuda_limits.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/selector_field.h"

namespace kvasir::worker {
namespace {

using kernels::DType;

constexpr int64_t kMaxGroup = 8;  // query heads of a KV head (kernels/attention/attend_cuda.h)

template <typename... Args>
absl::Status NotOnGpu(const Args&... args) {
  return absl::UnimplementedError(absl::StrCat("--device=cuda: ", args...));
}

// Checks an option that has only one value on the GPU, its default.
absl::Status CheckOption(absl::string_view name, const std::string& value,
                         absl::string_view served) {
  if (value.empty() || value == served) return absl::OkStatus();
  return NotOnGpu(name, " is ", value, "; it must be ", served);
}

absl::Status CheckScope(absl::string_view selector, const std::string& scope, int64_t num_ranks) {
  if (num_ranks == 1) return absl::OkStatus();
  return CheckOption(absl::StrCat("the scope of ", selector, " over ranks"), scope, "group");
}

absl::Status CheckSelector(const v1::AttentionPolicy& policy, int64_t num_ranks) {
  switch (policy.selector_case()) {
    case v1::AttentionPolicy::kAll:
    case v1::AttentionPolicy::kStreaming:
    case v1::AttentionPolicy::kQuest:
    case v1::AttentionPolicy::kHip:
      return absl::OkStatus();
    case v1::AttentionPolicy::kTokenselect:
      return CheckScope("tokenselect", policy.tokenselect().scope(), num_ranks);
    case v1::AttentionPolicy::kInfinitehip:
      KVASIR_RETURN_IF_ERROR(CheckScope("infinitehip", policy.infinitehip().scope(), num_ranks));
      return CheckOption("the probe of infinitehip", policy.infinitehip().probe(), "digest");
    default:
      return NotOnGpu("the selector is ", v1::SelectorName(policy),
                      "; there are all, streaming, quest, tokenselect, hip and infinitehip");
  }
}

absl::Status CheckReuse(const v1::AttentionPolicy& policy) {
  if (policy.reuse().rule().empty()) return absl::OkStatus();
  if (policy.has_quest() || policy.has_tokenselect() || policy.has_hip() ||
      policy.has_infinitehip()) {
    return absl::OkStatus();
  }
  return NotOnGpu("selections of ", v1::SelectorName(policy),
                  " are reused; those of quest, tokenselect, hip and infinitehip can be");
}

absl::Status CheckPart(const v1::AttentionPolicy& policy, int64_t num_ranks) {
  KVASIR_RETURN_IF_ERROR(CheckSelector(policy, num_ranks));
  KVASIR_RETURN_IF_ERROR(CheckReuse(policy));
  if (policy.quality().min_mass() != 0) {
    return NotOnGpu("min_mass is ", policy.quality().min_mass(), "; it must be 0");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCudaDevice(absl::string_view name, int major, int minor) {
  if (major == 9 && minor == 0) return absl::OkStatus();
  return NotOnGpu(name, " has compute capability ", major, ".", minor,
                  "; kernels are made for 9.0, which is Hopper");
}

absl::Status CheckCudaModel(const TransformerOptions& model, DType kv_dtype) {
  if (model.dtype != DType::kBFloat16) {
    return NotOnGpu("the model computes in ", DTypeName(model.dtype), "; use --dtype=bfloat16");
  }
  if (kv_dtype != DType::kBFloat16) {
    return NotOnGpu("the KV is ", DTypeName(kv_dtype), "; use --kv-cache-dtype=bfloat16");
  }
  if (model.weights != kernels::WeightForm::kAsInput) {
    return NotOnGpu("weights are kept in int8; use --weights-dtype=auto");
  }
  const int64_t head_dim = model.config.head_dim;
  if (head_dim != 64 && head_dim != 128) {
    return NotOnGpu("heads of the model have ", head_dim, " dimensions; there are 64 and 128");
  }
  const int64_t group = model.config.num_heads / model.config.num_kv_heads;
  if (group > kMaxGroup) {
    return NotOnGpu(group, " query heads of the model share a KV head; at most ", kMaxGroup,
                    " may");
  }
  return absl::OkStatus();
}

absl::Status CheckCudaPolicies(std::span<const v1::SparsityPolicy> policies, int64_t num_ranks) {
  for (const v1::SparsityPolicy& policy : policies) {
    KVASIR_RETURN_IF_ERROR(CheckPart(policy.prefill(), num_ranks));
    KVASIR_RETURN_IF_ERROR(CheckPart(policy.decode(), num_ranks));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
