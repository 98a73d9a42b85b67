// Flags of decode_step_bench and the policies that they name.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "kernels/paged/paged_kv.h"
#include "proto/selector_field.h"
#include "tests/bench/kv_dtype.h"

namespace kvasir::worker {

inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "decode_step_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
inline T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return std::move(value).value();
}

struct Flags {
  std::string model = "tests/model/shapes/llama-3.1-8b";
  std::string device = "cuda";
  std::vector<int64_t> contexts = {4096, 32768, 131072, 524288};
  std::vector<std::string> policies = {"all", "quest", "quest+top_p", "infinitehip"};
  kernels::DType kv_cache_dtype = kernels::DType::kBFloat16;
  int64_t batch = 1;
  int64_t steps = 64;
  int64_t budget = 2048;
  int64_t window = 1024;
  int64_t ranks = 1;
  int64_t trace = 0;
  double device_share = 1;
  double turn = 0;
};

inline int64_t Number(absl::string_view text) {
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number > 0) return number;
  Check(absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a positive number")));
  return 0;
}

inline double Share(absl::string_view text) {
  double share = 0;
  if (absl::SimpleAtod(text, &share) && share >= 0 && share <= 1) return share;
  Check(absl::InvalidArgumentError(absl::StrCat("'", text, "' is not in 0 to 1")));
  return 0;
}

inline Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    const auto& [name, value] = flag;
    if (name == "--model")
      flags.model = value;
    else if (name == "--device")
      flags.device = value;
    else if (name == "--policies")
      flags.policies = absl::StrSplit(value, ',');
    else if (name == "--kv-cache-dtype")
      flags.kv_cache_dtype = Value(kernels::ParseKvDType(value));
    else if (name == "--batch")
      flags.batch = Number(value);
    else if (name == "--steps")
      flags.steps = Number(value);
    else if (name == "--budget")
      flags.budget = Number(value);
    else if (name == "--window")
      flags.window = Number(value);
    else if (name == "--ranks")
      flags.ranks = Number(value);
    else if (name == "--trace")
      flags.trace = Number(value);
    else if (name == "--device-share")
      flags.device_share = Share(value);
    else if (name == "--turn")
      flags.turn = Share(value);
    else if (name == "--contexts") {
      flags.contexts.clear();
      for (const absl::string_view text : absl::StrSplit(value, ',')) {
        flags.contexts.push_back(Number(text) / kernels::kPageTokens * kernels::kPageTokens);
      }
    } else {
      Check(absl::InvalidArgumentError(absl::StrCat("what is ", argv[i], "?")));
    }
  }
  std::sort(flags.contexts.begin(), flags.contexts.end());
  return flags;
}

// Returns the server's policy; the same message has the numbers of a sequence.
inline v1::SparsityPolicy MakePolicy(const std::string& name, const Flags& flags) {
  v1::SparsityPolicy policy;
  v1::SetSelector("all", *policy.mutable_prefill());
  v1::AttentionPolicy& decode = *policy.mutable_decode();
  const std::vector<std::string> parts = absl::StrSplit(name, '+');
  v1::SetSelector(parts[0], decode);
  const bool is_hip = parts[0] == "infinitehip";
  if (is_hip) decode.mutable_infinitehip()->set_preset("3k");
  decode.set_sink_tokens(128);
  decode.set_window_tokens(static_cast<uint32_t>(flags.window));
  decode.set_token_budget(static_cast<uint32_t>(flags.budget));
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i] == "top_p") {
      decode.set_top_p(0.95f);
    } else if (parts[0] == "quest" && parts[i] == "bound") {
      decode.mutable_quest()->set_score("bound");
    } else if (is_hip && parts[i] == "5k") {
      decode.mutable_infinitehip()->set_preset("5k");
    } else if (parts[i] == "layer") {  // all heads of a layer share a selection
      if (is_hip) {
        decode.mutable_infinitehip()->set_scope("layer");
      } else {
        decode.mutable_tokenselect()->set_scope("layer");
      }
    } else {
      decode.mutable_reuse()->set_rule(parts[i]);
      decode.mutable_reuse()->set_interval(8);
    }
  }
  return policy;
}

}  // namespace kvasir::worker
