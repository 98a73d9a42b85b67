// The rules by which coordinator and worker check a policy, compared with the kernels' own limits.
#include "proto/policy_check.h"

#include <algorithm>
#include <memory>
#include <string>

#include "gtest/gtest.h"

#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

v1::AttentionPolicy MakePart(absl::string_view selector, absl::string_view preset) {
  v1::AttentionPolicy part = MakeNumbers(0, 1, 64);
  v1::SetSelector(selector, part);
  if (!preset.empty()) part.mutable_infinitehip()->set_preset(std::string(preset));
  return part;
}

uint32_t LeastWindow(v1::AttentionPolicy part) {
  for (uint32_t window = 1; window <= 1024; ++window) {
    part.set_window_tokens(window);
    if (v1::CheckPolicyPart("policy", part).ok()) return window;
  }
  return 0;
}

// Returns the least window according to the kernels: the selector's minimum, and more than its
// selections reach into while they serve.
int64_t LeastWindowOfKernels(const kernels::Selector& selector, const v1::AttentionPolicy& part) {
  int64_t least = selector.MinWindowTokens();
  if (part.reuse().rule().empty()) return least;
  const auto rule = kernels::MakeReuseRule(part.reuse().rule()).value();
  const kernels::ReuseNumbers numbers = {.interval = part.reuse().interval(),
                                         .theta = 0.9f,
                                         .theta_force = 0.5f,
                                         .max_age = part.reuse().max_age()};
  return std::max(least, kernels::ReachTokens(selector, *rule, numbers) + 1);
}

void CompareWithEveryRule(const kernels::Selector& selector, v1::AttentionPolicy part) {
  EXPECT_EQ(LeastWindow(part), LeastWindowOfKernels(selector, part));
  for (const char* rule : {"interval", "cosine", "both"}) {
    for (const uint32_t interval : {1u, 3u, 8u, 20u, 63u, 64u}) {
      SCOPED_TRACE(testing::Message() << rule << ", interval " << interval);
      part.mutable_reuse()->set_rule(rule);
      part.mutable_reuse()->set_interval(interval);
      part.mutable_reuse()->set_max_age(64);
      EXPECT_EQ(LeastWindow(part), LeastWindowOfKernels(selector, part));
    }
  }
}

TEST(PolicyCheckTest, WindowsAreRefusedIfAndOnlyIfTheKernelsWouldRefuseThem) {
  for (const kernels::SelectorMethod& method : kernels::SelectorMethods()) {
    if (method.name == "all" || method.name == "streaming") continue;  // nothing to reuse
    SCOPED_TRACE(method.name);
    if (method.name != "infinitehip") {
      CompareWithEveryRule(*kernels::MakeSelector(method.name).value(), MakePart(method.name, ""));
      continue;
    }
    for (const char* preset : {"3k", "5k", "3k-fast", "3k-flash"}) {
      SCOPED_TRACE(preset);
      const auto selector =
          kernels::MakeSelector(method.name, {{.name = "preset", .value = preset}}).value();
      CompareWithEveryRule(*selector, MakePart(method.name, preset));
    }
  }
}

}  // namespace
}  // namespace kvasir::worker
