// Refusals of --device=cuda, which must say which flag to change.
#include "worker/backend/cuda/cuda_limits.h"

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/sparse/methods.h"
#include "proto/selector_field.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using testing::HasSubstr;

TransformerOptions ServedModel() {
  TransformerOptions model;
  model.config.head_dim = 128;
  model.config.num_heads = 32;
  model.config.num_kv_heads = 8;
  model.dtype = DType::kBFloat16;
  return model;
}

v1::SparsityPolicy ServedPolicy() {
  v1::SparsityPolicy policy;
  v1::SetSelector("all", *policy.mutable_prefill());
  v1::SetSelector("quest", *policy.mutable_decode());
  return policy;
}

void ExpectRefused(const absl::Status& status, const std::string& hint) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--device=cuda"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(hint));
}

TEST(CudaLimits, GpusItRunsOn) {
  constexpr size_t kShared = 227 << 10;
  EXPECT_TRUE(CheckCudaDevice({"NVIDIA H200", 9, 0, kShared, true}).ok());
  EXPECT_TRUE(CheckCudaDevice({"NVIDIA B200", 10, 0, kShared, true}).ok());
  ExpectRefused(CheckCudaDevice({"NVIDIA A100", 8, 0, 163 << 10, true}),
                "NVIDIA A100 has compute capability 8.0");
  ExpectRefused(CheckCudaDevice({"NVIDIA RTX 5090", 12, 0, 99 << 10, true}),
                "NVIDIA RTX 5090 has 99 KiB of shared memory");
  ExpectRefused(CheckCudaDevice({"NVIDIA B200", 10, 0, kShared, false}),
                "-DKVASIR_CUDA_ARCHITECTURES=100");
}

TEST(CudaLimits, ModelsItComputes) {
  for (const DType kv : {DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    EXPECT_TRUE(CheckCudaModel(ServedModel(), kv).ok()) << DTypeName(kv);
  }
  TransformerOptions model = ServedModel();
  model.config.head_dim = 64;
  EXPECT_TRUE(CheckCudaModel(model, DType::kBFloat16).ok());
  for (const auto extension : {PositionExtension::kStreaming, PositionExtension::kSelfExtend}) {
    model.extension = extension;
    EXPECT_TRUE(CheckCudaModel(model, DType::kBFloat16).ok());
  }
}

TEST(CudaLimits, ModelsItDoesNot) {
  TransformerOptions model = ServedModel();
  model.dtype = DType::kFloat32;
  ExpectRefused(CheckCudaModel(model, DType::kBFloat16), "--dtype=bfloat16");
  ExpectRefused(CheckCudaModel(ServedModel(), DType::kFloat32), "--kv-cache-dtype=bfloat16");
  model = ServedModel();
  model.weights = kernels::WeightForm::kInt8;
  ExpectRefused(CheckCudaModel(model, DType::kBFloat16), "--weights-dtype=auto");
  for (const int64_t head_dim : {80, 96, 256}) {
    model = ServedModel();
    model.config.head_dim = head_dim;
    ExpectRefused(CheckCudaModel(model, DType::kBFloat16),
                  absl::StrCat("head_dim of the model is ", head_dim, "; it must be 64 or 128"));
  }
}

absl::Status CheckPolicy(const v1::SparsityPolicy& policy, int64_t num_kv_heads = 8,
                         bool on_demand = false) {
  const std::vector<v1::SparsityPolicy> policies = {ServedPolicy(), policy};
  TransformerOptions model = ServedModel();
  model.shard.num_ranks = 2;
  model.config.num_kv_heads = num_kv_heads;
  return CheckCudaPolicies(policies, model, on_demand);
}

TEST(CudaLimits, PoliciesItServesFromDisk) {
  const auto check = [](const v1::SparsityPolicy& policy) {
    return CheckPolicy(policy, /*num_kv_heads=*/8, /*on_demand=*/true);
  };
  for (const std::string selector : {"all", "streaming", "quest", "infinitehip"}) {
    v1::SparsityPolicy policy = ServedPolicy();
    v1::SetSelector(selector, *policy.mutable_decode());
    EXPECT_TRUE(check(policy).ok()) << selector;
  }
  for (const std::string selector : {"hip", "tokenselect"}) {
    v1::SparsityPolicy policy = ServedPolicy();
    v1::SetSelector(selector, *policy.mutable_decode());
    ExpectRefused(check(policy), "the selector " + selector);
    policy = ServedPolicy();
    v1::SetSelector(selector, *policy.mutable_prefill());
    ExpectRefused(check(policy), "--kv-on-demand-size-gb");
  }
}

TEST(CudaLimits, PoliciesItServes) {
  for (const std::string selector :
       {"all", "streaming", "quest", "tokenselect", "hip", "infinitehip"}) {
    v1::SparsityPolicy policy = ServedPolicy();
    v1::SetSelector(selector, *policy.mutable_prefill());
    v1::SetSelector(selector, *policy.mutable_decode());
    policy.mutable_decode()->set_top_p(0.9f);
    policy.mutable_decode()->mutable_art()->set_order("importance");
    EXPECT_TRUE(CheckPolicy(policy).ok()) << CheckPolicy(policy);
    for (const std::string rule : {"interval", "cosine", "both"}) {
      policy.mutable_decode()->mutable_reuse()->set_rule(rule);
      const bool has_lists = selector != "all" && selector != "streaming";
      EXPECT_EQ(CheckPolicy(policy).ok(), has_lists) << CheckPolicy(policy);
    }
  }
}

TEST(CudaLimits, ListsOfALayerOverRanksAreServed) {
  v1::SparsityPolicy policy = ServedPolicy();
  policy.mutable_prefill()->mutable_infinitehip()->set_scope("layer");
  policy.mutable_decode()->mutable_tokenselect()->set_scope("layer");
  policy.mutable_decode()->mutable_reuse()->set_rule("cosine");
  EXPECT_TRUE(CheckPolicy(policy).ok()) << CheckPolicy(policy);
}

TEST(CudaLimits, PoliciesItDoesNot) {
  for (const bool in_prefill : {true, false}) {
    const auto part = [&](v1::SparsityPolicy& policy) {
      return in_prefill ? policy.mutable_prefill() : policy.mutable_decode();
    };
    v1::SparsityPolicy policy = ServedPolicy();
    part(policy)->mutable_infinitehip()->set_probe("centre");
    ExpectRefused(CheckPolicy(policy), "probe of infinitehip is centre; it must be digest");
    policy = ServedPolicy();
    part(policy)->mutable_streaming();
    part(policy)->mutable_reuse()->set_rule("cosine");
    ExpectRefused(CheckPolicy(policy), "selections of streaming are reused");
    policy = ServedPolicy();
    part(policy)->mutable_quality()->set_min_mass(0.5f);
    ExpectRefused(CheckPolicy(policy), "min_mass");
  }
}

TEST(CudaLimits, LargeGroupsLeaveSomeMethodsOut) {
  constexpr int64_t kKvHeads = 2;  // 16 query heads for each
  for (const std::string selector : {"all", "streaming", "quest", "hip", "infinitehip"}) {
    v1::SparsityPolicy policy = ServedPolicy();
    v1::SetSelector(selector, *policy.mutable_prefill());
    v1::SetSelector(selector, *policy.mutable_decode());
    EXPECT_TRUE(CheckPolicy(policy, kKvHeads).ok()) << CheckPolicy(policy, kKvHeads);
  }
  v1::SparsityPolicy policy = ServedPolicy();
  policy.mutable_decode()->mutable_tokenselect();
  ExpectRefused(CheckPolicy(policy, kKvHeads),
                "tokenselect is asked for, and 16 query heads of the model share a KV head; "
                "tokenselect serves at most 8");
  EXPECT_TRUE(CheckPolicy(policy, 4).ok()) << CheckPolicy(policy, 4);
  policy = ServedPolicy();
  policy.mutable_decode()->set_top_p(0.9f);
  ExpectRefused(CheckPolicy(policy, kKvHeads), "top_p serves at most 8");
  policy = ServedPolicy();
  policy.mutable_decode()->mutable_art();
  ExpectRefused(
      CheckPolicy(policy, kKvHeads),
      "larger groups have all, streaming, quest, hip and infinitehip, without top_p and art");
}

// Returns the option values that a selector refuses on GPUs, as the docs write them. Every value of
// every option is tried; one that the method does not have is an error of Create.
std::string RefusedOptions(const kernels::SelectorMethod& method) {
  std::string refused;
  for (const std::string option : {"preset", "probe", "scope", "score"}) {
    for (const std::string value : {"3k", "5k", "3k-fast", "3k-flash", "digest", "centre", "first",
                                    "group", "layer", "estimate", "bound"}) {
      const auto selector = method.make({{.name = option, .value = value}});
      if (!selector.ok() || (*selector)->SupportsGpu().options.ok()) continue;
      absl::StrAppend(&refused, refused.empty() ? "" : ", ", "`", option, ": ", value, "`");
    }
  }
  return refused;
}

// The table in docs/sparse_methods.md is that of the methods.
TEST(CudaLimits, TheDocsSayWhatRunsOnGpus) {
  std::string table =
      "| selector | runs on a GPU | its lists are reused there | refused there |\n"
      "|---|---|---|---|\n";
  const auto yes_or_no = [](bool yes) { return yes ? "yes" : "no"; };
  for (const kernels::SelectorMethod& method : kernels::SelectorMethods()) {
    const kernels::GpuSupport support = method.make({}).value()->SupportsGpu();
    std::string refused = RefusedOptions(method);
    if (support.runs && !support.any_group) {
      absl::StrAppend(&refused, refused.empty() ? "" : ", ", "more than ", kernels::kMaxCudaGroup,
                      " query heads a KV head");
    }
    absl::StrAppend(&table, "| `", method.name, "` | ", yes_or_no(support.runs), " | ",
                    yes_or_no(support.reuses), " | ", refused, refused.empty() ? "|\n" : " |\n");
  }
  std::ifstream file("docs/sparse_methods.md");
  const std::string docs{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(docs, HasSubstr(table));
}

}  // namespace
}  // namespace kvasir::worker
