// Policies for the tests of policy.h.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/policy/policy.h"
#include "proto/selector_field.h"

namespace kvasir::coordinator {

inline v1::SparsityPolicy Policy(const std::string& name) {
  v1::SparseConfig config;
  config.set_sparse_selector("quest");
  config.set_sparse_prefill_selector("all");
  config.set_sparse_token_budget(2048);
  config.set_sparse_sink_tokens(128);
  config.set_sparse_window_tokens(512);
  config.set_sparse_tail_tokens(64);
  v1::SparsityPolicy policy = PolicyFromFlags(config);
  policy.set_name(name);
  return policy;
}

inline v1::AttentionPolicy MakeNumbers() {
  v1::AttentionPolicy policy;
  policy.set_sink_tokens(1);
  policy.set_window_tokens(2);
  policy.set_token_budget(3);
  return policy;
}

inline ResolvedPolicy Resolved(const std::string& prefill, const std::string& decode) {
  ResolvedPolicy policy;
  for (v1::AttentionPolicy* part : {&policy.prefill, &policy.decode}) {
    v1::SetSelector(part == &policy.prefill ? prefill : decode, *part);
    part->set_sink_tokens(100);
    part->set_window_tokens(1000);
    part->set_token_budget(part->has_quest() ? 2001 : 2000);  // 32 pages
  }
  return policy;
}

inline void ExpectInvalid(const absl::Status& status, absl::string_view message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(std::string(message)));
}

}  // namespace kvasir::coordinator
